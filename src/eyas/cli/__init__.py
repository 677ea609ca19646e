"""The command line: every command and its flags, out of the settings of the stages."""
