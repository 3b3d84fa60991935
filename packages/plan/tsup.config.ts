import { defineConfig } from "tsup";

export default defineConfig({
  entry: {
    index: "src/index.ts",
    "prove/index": "src/prove/index.ts",
    "data/index": "src/data/index.ts",
    "cli/index": "src/cli/index.ts",
    // The program kv-plan.
    cli: "src/cli/cli.ts",
  },
  format: ["esm"],
  target: "node20",
  dts: true,
  sourcemap: true,
  clean: true,
});
