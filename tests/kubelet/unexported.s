// Empty on purpose, see unexported.go.
