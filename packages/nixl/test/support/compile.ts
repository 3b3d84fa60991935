import { execFile } from "node:child_process";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";

/**
 * Compiles the shared library `name` in a folder. It defines the functions of `has`, and calls those
 * of `calls`, which the libraries of `needs` in the folder define.
 */
export async function compile(
  folder: string,
  name: string,
  { has = [], calls = [], needs = [] }: Partial<Record<"has" | "calls" | "needs", string[]>>,
): Promise<string> {
  const source = join(folder, `${name}.c`);
  const lines = [
    ...has.map((one) => `int ${one}(void) { return 0; }`),
    ...calls.map((one) => `int ${one}(void); int kv_calls_${one}(void) { return ${one}(); }`),
  ];
  await writeFile(source, `${lines.join("\n")}\n`);
  const file = join(folder, name);
  const libraries = needs.map((library) => join(folder, library));
  const args = ["-shared", "-fPIC", `-Wl,-soname,${name}`, "-o", file, source, ...libraries];
  await promisify(execFile)("cc", args);
  return file;
}
