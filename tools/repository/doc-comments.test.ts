import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { expect, test } from "vitest";
import { findUndocumented, type Undocumented } from "./doc-comments.js";
import { root } from "./source-files.js";

test("each public name has a doc comment", { timeout: 240_000 }, () => {
  const { undocumented } = findUndocumented(root);
  expect(undocumented.map(({ place, name }) => `${place}  ${name}`)).toEqual([]);
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

test("exports and members without a doc comment are found, with their places", () => {
  const folder = mkdtempSync(join(tmpdir(), "kv-docs-"));
  const write = (path: string, text: string) => {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), text);
  };
  const manifest = (rest: object) =>
    JSON.stringify({ exports: { ".": { default: "./dist/index.js" } }, ...rest });
  write("tsconfig.json", '{ "compilerOptions": { "paths": { "@kv/*": ["./packages/*/src/index.ts"] } } }');
  write("packages/other/package.json", manifest({}));
  write("packages/other/src/index.ts", "export interface Other {}\n");
  write("packages/sample/package.json", manifest({}));
  write("packages/sample/src/index.ts", SOURCE.trimStart());
  write("packages/secret/package.json", manifest({ private: true }));
  write("packages/secret/src/index.ts", "export const bare = 1;\n");
  const { undocumented } = findUndocumented(`${folder}/`);
  rmSync(folder, { recursive: true });

  const line = ({ place, name }: Undocumented) => `${place} ${name}`;
  expect(undocumented.map(line)).toEqual([
    "packages/other/src/index.ts:1 Other",
    "packages/sample/src/index.ts:7 Documented.bare",
    "packages/sample/src/index.ts:8 Documented.method",
    "packages/sample/src/index.ts:10 Bare",
    "packages/sample/src/index.ts:19 Saying.port",
    "packages/sample/src/index.ts:29 Sample.method",
    "packages/sample/src/index.ts:34 empty",
    "packages/sample/src/index.ts:35 bareFunction",
  ]);
});
