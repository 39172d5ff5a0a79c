// Empty on purpose, see release.go.
