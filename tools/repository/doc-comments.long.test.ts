// A long suite: 30 s of the type checker; npm run lint:docs is the same check.

import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import { findUndocumented, type Undocumented } from "./doc-comments.js";
import { findDefaults } from "./option-defaults.js";
import { publicProgram } from "./public-program.js";
import { root } from "./source-files.js";

test("each export has a doc comment, and each option the @default that the code has", {
  timeout: 240_000,
}, () => {
  const program = publicProgram(root);
  const undocumented = findUndocumented(root, program);
  expect(undocumented.map(({ place, name }) => `${place}  ${name}`)).toEqual([]);
  const { findings, compared } = findDefaults(root, program);
  expect(findings).toEqual([]);
  expect(compared).toBeGreaterThan(60);
});

const SOURCE = `
import type { Other } from "@kv/other";
export type { Other };
/** Documented. */
export interface Documented {
  /** Documented. */
  readonly lengthBytes: number;
  readonly bare: string;
  method(): void;
}
export interface Bare {
  /** Documented. */
  readonly lengthBytes: number;
}
/** A union. */
export type Saying =
  | {
      /** Which one it is. */
      readonly says: "ready";
      readonly port: number;
    }
  | { readonly says: "bye" };
/** Implements an interface, and inherits its comments. */
export class Sample implements Documented {
  readonly lengthBytes = 1;
  /** Documented here. */
  readonly bare = "";
  #hidden = 1;
  private alsoHidden = this.#hidden;
  method(): void {
    this.alsoHidden += 1;
  }
}
/** */
export const empty = 1;
export function bareFunction(): void {}
interface NotExported {
  readonly free: number;
}
/** Documented. */
export const use = (value: NotExported) => value.free;
`;

/** Calls `look` with a folder of packages; `secret` is private. */
function withPackages<T>(
  sources: Readonly<Record<string, string>>,
  look: (folder: string) => T,
): T {
  const folder = scratchFolder(onTestFinished);
  const write = (path: string, text: string) => {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), text);
  };
  write(
    "tsconfig.json",
    '{ "compilerOptions": { "paths": { "@kv/*": ["./packages/*/src/index.ts"] } } }',
  );
  for (const [name, source] of Object.entries(sources)) {
    const manifest = {
      exports: { ".": { default: "./dist/index.js" } },
      private: name === "secret",
    };
    write(`packages/${name}/package.json`, JSON.stringify(manifest));
    write(`packages/${name}/src/index.ts`, source.trimStart());
  }
  return look(`${folder}/`);
}

test("exports without a doc comment are found, with their places", () => {
  const sources = {
    other: "export interface Other {}\n",
    sample: SOURCE,
    secret: "export const bare = 1;\n",
  };
  const undocumented = withPackages(sources, findUndocumented);

  const line = ({ place, name }: Undocumented) => `${place} ${name}`;
  expect(undocumented.map(line)).toEqual([
    "packages/other/src/index.ts:1 Other",
    "packages/sample/src/index.ts:10 Bare",
    "packages/sample/src/index.ts:34 empty",
    "packages/sample/src/index.ts:35 bareFunction",
  ]);
});

const OPTIONS = `
const USUAL_MS = 30 * 1000;
export interface ReadOptions {
  /** Its name. */
  readonly name: string;
  /** How long. @default 30_000 */
  readonly timeoutMs?: number | undefined;
  /** How often. @default 2 */
  readonly attempts?: number;
  /** Who asks. */
  readonly asker?: string;
  /** Where. By the way: by default here. @default undefined */
  readonly place?: string;
}
export interface Fact {
  readonly about?: string;
}
export function read({ timeoutMs = USUAL_MS, ...options }: ReadOptions) {
  return [timeoutMs, options.attempts ?? 3, options.asker ?? "me"];
}
`;

test("options without @default are found, and those whose code has another default", () => {
  const { findings, compared } = withPackages({ sample: OPTIONS }, (folder) =>
    findDefaults(folder, publicProgram(folder)),
  );
  expect(findings).toEqual([
    "packages/sample/src/index.ts:10  ReadOptions.asker has no @default",
    "packages/sample/src/index.ts:12  ReadOptions.place: write the default as @default",
    "packages/sample/src/index.ts:18  ReadOptions.attempts has @default 2, and here 3",
  ]);
  expect(compared).toBe(3);
});
