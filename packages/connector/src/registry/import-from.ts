import { isAbsolute, resolve as resolvePath } from "node:path";
import { pathToFileURL } from "node:url";
import { resolve } from "import-meta-resolve";

/**
 * Imports as a module in `directory` would: `import()` itself looks from where it is written, and an application's packages are not
 * installed beside this one. Takes what `import` takes, and absolute paths on every system. Errors: those of resolving and importing.
 */
export async function importFrom(specifier: string, directory: string): Promise<unknown> {
  if (isAbsolute(specifier)) return import(pathToFileURL(specifier).href);
  const parent = pathToFileURL(resolvePath(directory, "noname.js")).href;
  return import(resolve(specifier, parent));
}
