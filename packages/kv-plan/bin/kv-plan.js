#!/usr/bin/env node
// Exists before the build, so that package managers can link the command on install.
import "../dist/cli.js";
