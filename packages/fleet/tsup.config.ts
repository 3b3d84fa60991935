import { defineConfig } from "tsup";

export default defineConfig({
  entry: ["src/index.ts", "src/kubernetes.ts", "src/front-end.ts"],
  format: ["esm"],
  target: "node20",
  sourcemap: true,
  clean: true,
});
