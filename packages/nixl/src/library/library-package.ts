import { basename, dirname } from "node:path";
import type { Environment } from "../environment.js";
import { DEFAULT_VERSION } from "../install/wheels.js";
import { requireHere } from "../require-here.js";
import { cacheFolder, parseInstallFolder, realLibrary } from "./cache-folder.js";

/** Each name stands whole in a call, so that tools which trace files find it. */
const PACKAGES: Readonly<Record<string, () => string>> = {
  "linux-x64": () => requireHere.resolve("@kv/nixl-libs-linux-x64-gnu/libnixl_capi.so"),
  "linux-arm64": () => requireHere.resolve("@kv/nixl-libs-linux-arm64-gnu/libnixl_capi.so"),
};

/** An optional dependency of this package, with NIXL's libraries. */
export interface LibraryPackage {
  readonly name: string;
  /** Path of its `libnixl_capi.so`; undefined when it is not installed. */
  readonly path: string | undefined;
  /** Its folder with NIXL and libfabric; undefined when it is not installed. */
  readonly folder: string | undefined;
}

export function libraryPackage(): LibraryPackage {
  const platform = `${process.platform}-${process.arch}`;
  const name = `@kv/nixl-libs-${platform}-gnu`;
  try {
    const path = PACKAGES[platform]?.();
    return { name, path, folder: path && dirname(dirname(dirname(path))) };
  } catch {
    return { name, path: undefined, folder: undefined };
  }
}

/** That package's library has the plugins UCX, POSIX and LIBFABRIC; the wheel has more. */
function isOfPackage(libraryPath: string): boolean {
  const { path } = libraryPackage();
  return path !== undefined && realLibrary(path) === realLibrary(libraryPath);
}

/** Undefined for other libraries. */
export function wholeWheelHint(libraryPath: string): string | undefined {
  if (!isOfPackage(libraryPath)) return undefined;
  return `${libraryPackage().name} has the plugins UCX, POSIX and LIBFABRIC; for the others install NIXL's whole wheel: npx --no-install kv-nixl install`;
}

const INSTALL = "npx --no-install kv-nixl install";

/** How to restore an installation with damaged or missing files. */
export function reinstallHint(libraryPath: string, environment: Environment): string {
  if (isOfPackage(libraryPath)) {
    return `remove the folder of ${libraryPackage().name} from node_modules and install the packages again`;
  }
  const folder = dirname(dirname(realLibrary(libraryPath)));
  const installed = parseInstallFolder(basename(folder));
  if (installed === undefined || dirname(folder) !== realLibrary(cacheFolder(environment) ?? "")) {
    return `install NIXL again where it came from, or use kv-nixl's own (${INSTALL} --force; unset KV_NIXL_LIBRARY and NIXL_PREFIX)`;
  }
  const { cuda, version } = installed;
  const options = [
    ...(version === DEFAULT_VERSION ? [] : ["--version", version]),
    ...(cuda === "12" ? [] : ["--cuda", cuda]),
  ];
  return `install NIXL again: ${[INSTALL, "--force", ...options].join(" ")}`;
}
