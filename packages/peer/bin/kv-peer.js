#!/usr/bin/env node
// Exists before the build, so that package managers can link the command at installation.
import "../dist/cli.js";
