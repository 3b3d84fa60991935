import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, mergeConfig } from "vitest/config";
import shared from "../../../vitest.config.js";

// The tests with fast-check properties.
const root = join(import.meta.dirname, "../../../");
const files = ["packages", "apps"].flatMap((place) =>
  readdirSync(join(root, place)).flatMap((name) =>
    ["src", "test"].flatMap((folder) => testsOf(join(place, name, folder))),
  ),
);

function testsOf(folder: string): string[] {
  try {
    return (readdirSync(join(root, folder), { recursive: true }) as string[])
      .filter((name) => name.endsWith(".test.ts"))
      .map((name) => join(folder, name))
      .filter((path) => readFileSync(join(root, path), "utf8").includes('from "fast-check"'));
  } catch {
    return [];
  }
}

export default mergeConfig(
  { ...shared, test: { ...shared.test, projects: undefined, include: [] } },
  defineConfig({
    test: {
      include: files,
      testTimeout: 3_600_000,
      setupFiles: [join(import.meta.dirname, "./more-runs.ts")],
    },
  }),
);
