import { accessSync, constants, readdirSync, readFileSync, readlinkSync, statfsSync } from "node:fs";
import { basename } from "node:path";

/** What the checks read of a machine; another one can be made up for tests. */
export interface Host {
  readonly platform: string;
  readonly arch: string;
  readonly nodeVersion: string;
  /** Version of glibc; undefined where there is none. */
  readonly glibc: string | undefined;
  /** Text of a file, trimmed; undefined when it cannot be read. */
  text(path: string): string | undefined;
  /** Names in a folder; empty when it cannot be read. */
  names(folder: string): readonly string[];
  /** The last part of where a link leads. */
  linkName(path: string): string | undefined;
  writable(path: string): boolean;
  /** Of the file system at `path`. */
  space(path: string): { totalBytes: number; freeBytes: number } | undefined;
}

export function realHost(): Host {
  const attempt = <T>(read: () => T): T | undefined => {
    try {
      return read();
    } catch {
      return undefined;
    }
  };
  const report = process.platform === "linux" ? process.report.getReport() : undefined;
  return {
    platform: process.platform,
    arch: process.arch,
    nodeVersion: process.versions.node,
    glibc: (report as { header?: { glibcVersionRuntime?: string } } | undefined)?.header?.glibcVersionRuntime,
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
