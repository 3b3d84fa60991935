import { execFile } from "node:child_process";
import { existsSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

/** The name of a C compiler on PATH. */
export const compiler = (): string | undefined =>
  ["cc", "gcc", "clang"].find((name) =>
    (process.env["PATH"] ?? "").split(":").some((place) => existsSync(join(place, name))),
  );

/** Compiles `tools/bench/c/NAME.c` into a temporary folder. Resolves with the program's path. */
export async function compileC(name: string, flags: readonly string[] = []): Promise<string> {
  const command = compiler();
  if (command === undefined)
    throw new Error("this benchmark needs a C compiler: cc, gcc or clang on PATH");
  const program = join(mkdtempSync(join(tmpdir(), "kv-bench-")), name);
  const source = fileURLToPath(new URL(`./c/${name}.c`, import.meta.url));
  await promisify(execFile)(command, ["-O2", "-o", program, source, ...flags]);
  return program;
}
