import { defineConfig } from "tsup";

export default defineConfig({
  entry: { main: "src/main.ts", "model-worker": "src/model/worker/model-worker.ts" },
  format: ["esm"],
  target: "node20",
  sourcemap: true,
  clean: true,
});
