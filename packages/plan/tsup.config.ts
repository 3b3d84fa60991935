import { writeFile } from "node:fs/promises";
import { defineConfig, type Options } from "tsup";
import { buildPage } from "./page/build.js";

const common: Options = { format: ["esm"], target: "node20", sourcemap: true };

export default defineConfig([
  {
    ...common,
    entry: { index: "src/index.ts", "prove/index": "src/prove/index.ts", "data/index": "src/data/index.ts" },
    clean: ["!cli/**"],
    // The planner as one page for the browser.
    onSuccess: async () => writeFile("dist/kv-plan.html", await buildPage()),
  },
  {
    ...common,
    // The program kv-plan, and its report for other programs. They contain commander and the completion, so that the package installs nothing for them.
    entry: { index: "src/cli/index.ts", cli: "src/cli/cli.ts" },
    outDir: "dist/cli",
    noExternal: ["commander", "@bomb.sh/tab"],
    // Commander is CommonJS.
    banner: {
      js: 'import { createRequire } from "node:module"; const require = createRequire(import.meta.url);',
    },
    clean: true,
  },
]);
