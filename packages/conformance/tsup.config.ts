import { defineConfig } from "tsup";

export default defineConfig({
  entry: ["src/index.ts", "src/transport.ts", "src/connector.ts", "src/platform.ts"],
  format: ["esm"],
  target: "node20",
  sourcemap: true,
  clean: true,
});
