import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect } from "vitest";
import { root } from "../repository/source-files.js";
import { isShown, type Mask, type PageOutput } from "./page-outputs.js";

/** Fails unless the file shows what was printed; `vitest -u` writes the file. */
export async function expectShown(
  { page, text }: Pick<PageOutput, "page" | "text">,
  printed: string,
  mask?: Mask,
): Promise<void> {
  if (isShown(text, printed, mask)) return;
  const file = join(root, page);
  const written = readFileSync(file, "utf8").replace(text, () => printed);
  await expect(written).toMatchFileSnapshot(file);
}
