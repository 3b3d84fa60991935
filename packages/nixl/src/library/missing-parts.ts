import { access } from "node:fs/promises";
import { basename } from "node:path";
import { runCommand } from "@kv/program";
import type { Environment } from "../environment.js";
import { processReport } from "./c-library.js";

/** What keeps a shared library from loading. */
export type MissingPart =
  /** A library that the loader does not find. */
  | {
      readonly kind: "library";
      /** The name that the loader looks for. */
      readonly name: string;
    }
  /** A version of a library's symbols, such as `FABRIC_1.10`. */
  | {
      readonly kind: "version";
      readonly name: string;
      /** The library that should define the version. */
      readonly library: string;
    }
  /** A symbol that no library defines. */
  | { readonly kind: "symbol"; readonly name: string }
  /** The file itself: it cannot be read, or is damaged. */
  | {
      readonly kind: "file";
      /** The system's message. */
      readonly reason: string;
    };

const TIMEOUT_MS = 20_000;
/** For when Node's diagnostic report does not name the loader. */
const LOADERS: Readonly<Record<string, string>> = {
  x64: "/lib64/ld-linux-x86-64.so.2",
  arm64: "/lib/ld-linux-aarch64.so.1",
};

/**
 * Asks glibc's loader in another process, so no code of the library runs. `folders` are searched
 * after those of `LD_LIBRARY_PATH`. Takes about 30 ms.
 */
export async function missingParts(
  file: string,
  {
    environment = process.env,
    folders = [],
  }: { environment?: Environment | undefined; folders?: readonly string[] | undefined } = {},
): Promise<MissingPart[]> {
  const unreadable = await access(file).then(
    () => undefined,
    (error: Error) => error.message,
  );
  if (unreadable !== undefined) return [{ kind: "file", reason: unreadable }];
  const searched = [environment.LD_LIBRARY_PATH, ...folders].filter((folder) => folder).join(":");
  const env = {
    ...environment,
    // The loader lists libraries instead of starting a program, resolves every symbol, and goes on
    // after one that is missing.
    LD_TRACE_LOADED_OBJECTS: "1",
    LD_BIND_NOW: "1",
    LD_WARN: "1",
    ...(searched === "" ? {} : { LD_LIBRARY_PATH: searched }),
  };
  // Preloaded libraries, such as a sanitizer's, would change the result.
  delete (env as { LD_PRELOAD?: string }).LD_PRELOAD;
  const { exitCode, how, stdout, stderr } = await runCommand(loaderPath(), [file], {
    env,
    timeoutMs: TIMEOUT_MS,
  });
  const missing = parseLoader(`${stdout}\n${stderr}`);
  if (exitCode === 0 || missing.length > 0) return missing;
  const reason = `the loader ends with ${how}; the file is truncated or damaged`;
  return [{ kind: "file", reason: stderr.trim() || reason }];
}

/** Reports symbols only when no library or version is missing, because those cause them. */
export function parseLoader(output: string): MissingPart[] {
  const libraries = new Map<string, MissingPart>();
  const symbols = new Map<string, MissingPart>();
  for (const line of output.split("\n")) {
    const absent = /^\s*(\S+) => not found$/.exec(line);
    const version = /: (\S+): version [`'](\S+)' not found \(required by /.exec(line);
    const symbol = /^undefined symbol: ([^\s,]+)/.exec(line);
    if (absent?.[1] !== undefined) libraries.set(absent[1], { kind: "library", name: absent[1] });
    else if (version?.[1] !== undefined && version[2] !== undefined) {
      const library = basename(version[1]);
      libraries.set(`${library} ${version[2]}`, { kind: "version", name: version[2], library });
    } else if (symbol?.[1] !== undefined)
      symbols.set(symbol[1], { kind: "symbol", name: symbol[1] });
  }
  return [...(libraries.size > 0 ? libraries : symbols).values()];
}

function loaderPath(): string {
  const own = processReport().sharedObjects?.find((path) => /^ld-(linux|2)/.test(basename(path)));
  return own ?? LOADERS[process.arch] ?? "/lib/ld.so";
}

/** The part as text, such as `libfabric.so.1` or `FABRIC_1.10 of libfabric.so.1`. */
export function nameOfMissing(part: MissingPart): string {
  if (part.kind === "version") return `${part.name} of ${part.library}`;
  if (part.kind === "symbol") return `the symbol ${part.name}`;
  return part.kind === "file" ? part.reason : part.name;
}
