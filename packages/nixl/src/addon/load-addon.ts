import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { isMainThread } from "node:worker_threads";
import { KvError } from "@kv/interface";
import { cLibraryProblem, glibcVersion } from "../library/c-library.js";
import { moduleUrl, requireHere } from "../require-here.js";
import type { NativeAddon } from "./native.js";

/**
 * An installed package, or a bundle outside the repository, must not look for the repository's own
 * build.
 */
const repositoryBuild = (): string[] => {
  const root = /^(.*\/)packages\/nixl\/(?:src|dist)\/(?:[^/]+\/)*[^/]+$/.exec(
    fileURLToPath(moduleUrl),
  )?.[1];
  const isCheckout = root !== undefined && existsSync(`${root}native/build.mjs`);
  return !isCheckout || root.includes("/node_modules/") ? [] : [`${root}native/build/kv_nixl.node`];
};
/** Each name stands whole in a call, so that tools which trace files find it. */
const PLATFORMS: Readonly<Record<string, () => unknown>> = {
  "linux-x64": () => requireHere("@kv/nixl-linux-x64-gnu/kv_nixl.node"),
  "linux-arm64": () => requireHere("@kv/nixl-linux-arm64-gnu/kv_nixl.node"),
};
let loaded: NativeAddon | undefined;
let loadedFrom: string | undefined;

export function addonPath(): string | undefined {
  return loadedFrom;
}

/**
 * Loads the file of `KV_NIXL_ADDON`, else the platform package, else the repository's own build.
 * Throws `KV_ADDON_NOT_FOUND` with every place that was tried, and `KV_TRANSPORT_UNAVAILABLE` for a
 * lack of descriptors.
 */
export function loadAddon(): NativeAddon {
  if (loaded !== undefined) return loaded;
  const platform = `${process.platform}-${process.arch}`;
  // Another build, such as one with sanitizers.
  const named = process.env.KV_NIXL_ADDON ? [process.env.KV_NIXL_ADDON] : [];
  const usual = [`@kv/nixl-${platform}-gnu/kv_nixl.node`, ...repositoryBuild()];
  const places = named.length > 0 ? named : usual;
  const attempts: string[] = [];
  let refused: string | undefined;
  for (const place of places) {
    try {
      const packaged = place.startsWith("@") ? PLATFORMS[platform]?.() : undefined;
      const addon = (packaged ?? requireHere(place)) as NativeAddon;
      // process.exit() does not clean up addons, and NIXL's threads must stop before the C library
      // exits.
      if (isMainThread) process.once("exit", () => addon.stopAll());
      loaded = addon;
      loadedFrom = requireHere.resolve(place);
      return addon;
    } catch (error) {
      const { code = "" } = error as NodeJS.ErrnoException;
      if (code === "ERR_DLOPEN_DISABLED" || code === "ERR_ACCESS_DENIED") refused = code;
      attempts.push(
        `${place}: ${error instanceof Error ? error.message.split("\n")[0] : String(error)}`,
      );
    }
  }
  if (attempts.some((attempt) => /EMFILE|ENFILE|Too many open files/i.test(attempt))) {
    throw new KvError(
      "KV_TRANSPORT_UNAVAILABLE",
      `the addon of @kv/nixl cannot be opened: this process has no free file descriptor; tried ${attempts.join("; ")}`,
      { hint: "raise the limit (ulimit -n), or close files and sockets", details: { attempts } },
    );
  }
  if (refused !== undefined) {
    throw new KvError(
      "KV_ADDON_NOT_FOUND",
      `Node refuses to load the addon of @kv/nixl (${refused}); tried ${attempts.join("; ")}`,
      {
        hint: "start Node without --no-addons; with --permission, add --allow-addons and --allow-fs-read=*",
        details: { attempts },
      },
    );
  }
  // Package managers leave out platform packages that do not fit the machine.
  const problem = cLibraryProblem(process.platform, glibcVersion());
  throw new KvError(
    "KV_ADDON_NOT_FOUND",
    `the addon of @kv/nixl does not load on ${platform}${problem ? ` with ${problem.found}` : ""}; tried ${attempts.join("; ")}`,
    {
      hint:
        problem?.fix ??
        `install @kv/nixl-${platform}-gnu, or build it in the repository: node native/build.mjs`,
      details: { attempts },
    },
  );
}
