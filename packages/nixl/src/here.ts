import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

/** The path of a CommonJS module; not there in an ES module. */
declare const __filename: string | undefined;

/** The URL of this module or of the bundle that it is in. A bundle in CommonJS has no `import.meta.url`. */
export const here: string =
  import.meta.url ?? pathToFileURL(typeof __filename === "string" ? __filename : process.execPath).href;

/** Resolves and loads what lies in packages beside this one, which stay outside of a bundle. */
export const requireHere: NodeJS.Require = createRequire(here);
