import { createRequire } from "node:module";
import { dirname } from "node:path";
import { realLibrary } from "./cache-folder.js";

const require = createRequire(import.meta.url);

/** A package with NIXL's libraries, which is an optional dependency of this one. */
export interface LibraryPackage {
  /** Its name, such as `@kv/nixl-libs-linux-x64-gnu`. */
  readonly name: string;
  /** Path of its `libnixl_capi.so`; undefined when the package is not installed. */
  readonly path: string | undefined;
  /** Its folder with NIXL and with libfabric; undefined when the package is not installed. */
  readonly folder: string | undefined;
}

/** The package of this machine's platform, and its library if a package manager has installed it. */
export function libraryPackage(): LibraryPackage {
  const name = `@kv/nixl-libs-${process.platform}-${process.arch}-gnu`;
  try {
    const path = require.resolve(`${name}/libnixl_capi.so`);
    return { name, path, folder: dirname(dirname(dirname(path))) };
  } catch {
    return { name, path: undefined, folder: undefined };
  }
}

/** Whether the library is the one of that package. It has the plugins UCX, POSIX and LIBFABRIC; the wheel has more. */
export function isOfPackage(libraryPath: string): boolean {
  const { path } = libraryPackage();
  return path !== undefined && realLibrary(path) === realLibrary(libraryPath);
}

/** The hint for a backend that has no plugin in the package, but may have one in the wheel; undefined for other libraries. */
export function wholeWheelHint(libraryPath: string): string | undefined {
  if (!isOfPackage(libraryPath)) return undefined;
  return `${libraryPackage().name} has the plugins UCX, POSIX and LIBFABRIC; for the others install NIXL's whole wheel: npx --no-install kv-nixl install`;
}
