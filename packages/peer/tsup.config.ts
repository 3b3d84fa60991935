import { defineConfig } from "tsup";

export default defineConfig({
  // The child process is found beside the bundle.
  entry: { index: "src/index.ts", cli: "src/cli.ts", "probe-child": "src/doctor/memory/probe-child.ts" },
  format: ["esm"],
  target: "node20",
  sourcemap: true,
  clean: true,
});
