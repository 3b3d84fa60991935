import { existsSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

export const root = fileURLToPath(new URL("../../", import.meta.url));

const SOURCE = /\.(ts|mts|cts|mjs|cjs|js|cc|h)$/;
const TEST = /\.(test|test-support)\.ts$/;
const NOT_OURS = new Set(["node_modules", "dist", "build", "fixtures", ".turbo"]);

/**
 * The paths of all source files below the folders, relative to `base` and without tests; generated
 * folders and fixtures are left out.
 */
export function sourceFiles(base: string, folders: readonly string[]): string[] {
  return folders.flatMap((folder) => {
    if (!existsSync(join(base, folder))) return [];
    return readdirSync(join(base, folder), { withFileTypes: true }).flatMap((entry) => {
      const path = `${folder}/${entry.name}`;
      if (entry.isDirectory()) return NOT_OURS.has(entry.name) ? [] : sourceFiles(base, [path]);
      return SOURCE.test(entry.name) && !TEST.test(entry.name) ? [path] : [];
    });
  });
}
