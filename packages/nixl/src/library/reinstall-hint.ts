import { basename, dirname } from "node:path";
import type { Environment } from "../environment.js";
import { DEFAULT_VERSION } from "../install/wheels.js";
import { cacheFolder, parseInstallFolder, realLibrary } from "./cache-folder.js";
import { isOfPackage, libraryPackage } from "./library-package.js";

const INSTALL = "npx --no-install kv-nixl install";

/** For an error's hint: how to restore an installation of NIXL with damaged or missing files. */
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
