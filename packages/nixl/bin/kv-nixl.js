#!/usr/bin/env node
// A file that is there before the build, so that package managers can link the command when they
// install.
import "../dist/cli.js";
