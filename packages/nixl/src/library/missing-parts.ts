import { type ExecFileException, execFile } from "node:child_process";
import { access } from "node:fs/promises";
import { basename } from "node:path";
import type { Environment } from "./find-library.js";

/** What keeps a shared library from loading: a library that is not there, a version of its symbols, or a symbol. */
export type MissingPart =
  | { readonly kind: "library"; readonly name: string }
  | { readonly kind: "version"; readonly name: string; readonly library: string }
  | { readonly kind: "symbol"; readonly name: string }
  | { readonly kind: "file"; readonly reason: string };

const TIMEOUT_MS = 20_000;
const MAX_OUTPUT_BYTES = 8 << 20;
/** Where the loader is when Node's own report does not tell. */
const LOADERS: Readonly<Record<string, string>> = {
  x64: "/lib64/ld-linux-x86-64.so.2",
  arm64: "/lib/ld-linux-aarch64.so.1",
};

/**
 * Asks glibc's loader, in a process of its own, what the shared library `file` lacks. No code of the library runs. `folders` are searched
 * after those of `LD_LIBRARY_PATH`. An empty answer: it loads.
 */
export async function missingParts(
  file: string,
  {
    environment = process.env,
    folders = [],
  }: { environment?: Environment; folders?: readonly string[] } = {},
): Promise<MissingPart[]> {
  const unreadable = await access(file).then(
    () => undefined,
    (error: Error) => error.message,
  );
  if (unreadable !== undefined) return [{ kind: "file", reason: unreadable }];
  const searched = [environment.LD_LIBRARY_PATH, ...folders].filter((folder) => folder).join(":");
  const env = {
    ...environment,
    // The loader lists instead of starting, resolves every symbol, and goes on after the first that is missing.
    LD_TRACE_LOADED_OBJECTS: "1",
    LD_BIND_NOW: "1",
    LD_WARN: "1",
    ...(searched === "" ? {} : { LD_LIBRARY_PATH: searched }),
  };
  // Libraries that are put before all others, such as a sanitizer's, are not this one's affair.
  delete (env as { LD_PRELOAD?: string }).LD_PRELOAD;
  return await new Promise((resolve) => {
    execFile(
      loaderPath(),
      [file],
      { env, timeout: TIMEOUT_MS, maxBuffer: MAX_OUTPUT_BYTES },
      (error, stdout, stderr) => {
        const missing = parseLoader(`${stdout}\n${stderr}`);
        const failed = error !== null && missing.length === 0;
        resolve(failed ? [{ kind: "file", reason: stderr.trim() || endOf(error) }] : missing);
      },
    );
  });
}

/** Why there is nothing that the loader said. */
function endOf(error: ExecFileException): string {
  if (error.killed === true) return `the loader did not come to an end in ${TIMEOUT_MS / 1000} s`;
  const how = error.signal ? `dies of it with ${error.signal}` : `ends with ${error.code}`;
  return `the loader ${how}; the file is cut off, or not what it was`;
}

/** Reads what the loader prints. Symbols count only where no library and no version is missing: they follow from those. */
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
    } else if (symbol?.[1] !== undefined) symbols.set(symbol[1], { kind: "symbol", name: symbol[1] });
  }
  return [...(libraries.size > 0 ? libraries : symbols).values()];
}

function loaderPath(): string {
  const report = process.report.getReport() as { sharedObjects?: string[] };
  const own = report.sharedObjects?.find((path) => /^ld-(linux|2)/.test(basename(path)));
  return own ?? LOADERS[process.arch] ?? "/lib/ld.so";
}

/** In words, such as `libfabric.so.1` or `FABRIC_1.10 of libfabric.so.1`. */
export function nameOfMissing(part: MissingPart): string {
  if (part.kind === "version") return `${part.name} of ${part.library}`;
  if (part.kind === "symbol") return `the symbol ${part.name}`;
  return part.kind === "file" ? part.reason : part.name;
}
