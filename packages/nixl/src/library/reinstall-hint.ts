import { basename, dirname } from "node:path";
import { DEFAULT_VERSION } from "../install/wheels.js";
import { cacheFolder, type Environment, realLibrary } from "./find-library.js";

const INSTALL = "npx --no-install kv-nixl install";

/** What brings an installation of NIXL with damaged or missing files back, in words. */
export function howToReinstall(libraryPath: string, environment: Environment): string {
  const folder = dirname(dirname(realLibrary(libraryPath)));
  const [, cuda, version] = /^nixl-cu(\d+)-([^-]+)-/.exec(basename(folder)) ?? [];
  if (version === undefined || dirname(folder) !== realLibrary(cacheFolder(environment))) {
    return `install NIXL again where it came from, or take kv-nixl's own (${INSTALL} --force; unset KV_NIXL_LIBRARY and NIXL_PREFIX)`;
  }
  const which = [
    ...(version === DEFAULT_VERSION ? [] : ["--version", version]),
    ...(cuda === "12" ? [] : ["--cuda", cuda]),
  ];
  return `install NIXL again: ${[INSTALL, "--force", ...which].join(" ")}`;
}
