import { randomUUID } from "node:crypto";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, beforeAll, onTestFinished } from "vitest";

const remove = (folder: string) => rmSync(folder, { recursive: true, force: true });

/** The path of a folder that is there while the tests of the file, or of the `describe`, run. */
export function folderOfTests(): string {
  const folder = join(tmpdir(), `kv-${randomUUID()}`);
  beforeAll(() => void mkdirSync(folder));
  afterAll(() => remove(folder));
  return folder;
}

/** A new folder that is removed when the test has ended. */
export function folderOfTest(): string {
  const folder = mkdtempSync(join(tmpdir(), "kv-"));
  onTestFinished(() => remove(folder));
  return folder;
}
