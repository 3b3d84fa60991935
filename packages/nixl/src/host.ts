import {
  accessSync,
  constants,
  readdirSync,
  readFileSync,
  readlinkSync,
  statfsSync,
} from "node:fs";
import { basename } from "node:path";
import { glibcVersion } from "./library/c-library.js";

/** What the checks read of a machine. Tests use fake machines. */
export interface Host {
  /** As `process.platform`. */
  readonly platform: string;
  /** As `process.arch`. */
  readonly arch: string;
  /** Version of Node, such as "20.20.2". */
  readonly nodeVersion: string;
  /** Version of glibc; undefined when the C library is another one. */
  readonly glibc: string | undefined;
  /** The content of a file, trimmed; undefined when it cannot be read. */
  text(path: string): string | undefined;
  /** The names in a folder; empty when it cannot be read. */
  names(folder: string): readonly string[];
  /** The last part of a link's target; undefined when it is not a link. */
  linkName(path: string): string | undefined;
  writable(path: string): boolean;
  /** Size and free space of the file system at `path`; undefined when there is none. */
  space(path: string): { totalBytes: number; freeBytes: number } | undefined;
}

/** This machine. */
export function realHost(): Host {
  const attempt = <T>(read: () => T): T | undefined => {
    try {
      return read();
    } catch {
      return undefined;
    }
  };
  return {
    platform: process.platform,
    arch: process.arch,
    nodeVersion: process.versions.node,
    get glibc() {
      return glibcVersion();
    },
    text: (path) => attempt(() => readFileSync(path, "utf8").trim()),
    names: (folder) => attempt(() => readdirSync(folder).sort()) ?? [],
    linkName: (path) => attempt(() => basename(readlinkSync(path))),
    writable: (path) => attempt(() => accessSync(path, constants.W_OK) ?? true) ?? false,
    space: (path) =>
      attempt(() => {
        const { bsize, blocks, bavail } = statfsSync(path);
        return { totalBytes: bsize * blocks, freeBytes: bsize * bavail };
      }),
  };
}
