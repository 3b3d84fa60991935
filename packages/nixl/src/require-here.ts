import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

/** The path of a CommonJS module; not there in an ES module. */
declare const __filename: string | undefined;

/** For a bundle in CommonJS, which has no `import.meta.url`. */
const bundle = pathToFileURL(typeof __filename === "string" ? __filename : process.execPath).href;

/** The URL of this module or of the bundle that it is in. */
export const moduleUrl: string = import.meta.url ?? bundle;

/**
 * Resolves and loads what lies in packages beside this one, which stay outside of a bundle. Written
 * so that tools which trace files (@vercel/nft 1.11) know it and follow its calls:
 * `import.meta.url` in the call, and no other `createRequire` in the package.
 */
export const requireHere: NodeJS.Require = createRequire(import.meta.url ?? bundle);
