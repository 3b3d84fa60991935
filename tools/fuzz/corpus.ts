import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("./corpus/", import.meta.url));

/** An input of the corpus. */
export interface CorpusInput {
  readonly file: string;
  readonly input: Uint8Array;
}

/** The inputs that are kept for a target, by file name. */
export function readCorpus(target: string): CorpusInput[] {
  const folder = `${ROOT}${target}`;
  if (!existsSync(folder)) return [];
  return readdirSync(folder)
    .sort()
    .map((file) => ({ file, input: readFileSync(`${folder}/${file}`) }));
}

/** The folders of the corpus. */
export function corpusTargets(): string[] {
  return existsSync(ROOT) ? readdirSync(ROOT).sort() : [];
}

/** Keeps an input; the same input is kept once. Returns its path. */
export function keepInput(target: string, input: Uint8Array, kind: "failed" | "covers"): string {
  const folder = `${ROOT}${target}`;
  mkdirSync(folder, { recursive: true });
  const path = `${folder}/${kind}-${createHash("sha256").update(input).digest("hex").slice(0, 12)}.bin`;
  writeFileSync(path, input);
  return path;
}
