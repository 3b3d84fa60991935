import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

/** Absent in an ES module. */
declare const __filename: string | undefined;

/** For a bundle in CommonJS, which has no `import.meta.url`. */
const bundle = pathToFileURL(typeof __filename === "string" ? __filename : process.execPath).href;

/** The URL of this module or of the bundle that it is in. */
export const moduleUrl: string = import.meta.url ?? bundle;

/**
 * Tools which trace files (@vercel/nft 1.11) follow this only with `import.meta.url` in the call,
 * and no other `createRequire` in the package. What it loads stays outside of a bundle.
 */
export const requireHere: NodeJS.Require = createRequire(import.meta.url ?? bundle);
