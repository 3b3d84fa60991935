import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll } from "vitest";

/** An empty folder, which is removed after the tests of the file or the group, or at `end`. */
export function scratchFolder(end: (remove: () => void) => void = afterAll): string {
  const folder = mkdtempSync(join(tmpdir(), "kv-test-"));
  end(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}
