#!/usr/bin/env node
// Exists before the build, so that package managers can link the command when they install.
import "../dist/cli.js";
