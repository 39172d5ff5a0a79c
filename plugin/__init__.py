"""The device plugin: this machine's GPUs for the kubelet; `plugin.life.DevicePlugin` runs it."""
