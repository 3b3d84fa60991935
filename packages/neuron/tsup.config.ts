import { defineConfig } from "tsup";

export default defineConfig({
  entry: { index: "src/index.ts", cli: "src/cli.ts", probe: "src/doctor/probe.ts" },
  format: ["esm"],
  target: "node20",
  sourcemap: true,
  clean: true,
});
