import { join } from "node:path";
import { KvError } from "@kv/interface";
import type { Environment } from "../environment.js";
import { cLibraryProblem, glibcVersion } from "../library/c-library.js";
import { exists, makeInCache, requireCacheFolder } from "../library/cache-folder.js";
import { LIBRARY_FILE } from "../library/find-library.js";
import {
  downloadCommand,
  downloadWheel,
  readVerified,
  type VerifiedWheel,
} from "./download-wheel.js";
import { installLibfabric } from "./install-libfabric.js";
import { unpackWheel } from "./unpack-wheel.js";
import { type Cuda, DEFAULT_VERSION, type Wheel, wheelFor } from "./wheels.js";

/** Options of `installNixl`. */
export interface InstallOptions {
  /**
   * Version of NIXL. Only versions whose wheels are pinned in this package can be installed.
   * @default "1.5.0"
   */
  readonly version?: string | undefined;
  /**
   * Major version of CUDA that the wheel is built for. The wheel works without CUDA as well.
   * @default 12
   */
  readonly cuda?: Cuda | undefined;
  /**
   * Path of the wheel, when this machine has no package index. Its SHA-256 must be the one that is
   * pinned for `version` and `cuda`.
   * @default pip downloads the wheel
   */
  readonly wheel?: string | undefined;
  /**
   * Libraries from outside the wheel that a plugin needs: `libfabric` for LIBFABRIC. @default none
   */
  readonly with?: readonly PluginDependency[] | undefined;
  /** Replace an existing installation, such as when a file is damaged. @default false */
  readonly force?: boolean | undefined;
  /** Gets one line for each step. */
  readonly onProgress?: ((line: string) => void) | undefined;
  /** The variables that apply to pip and to the cache. @default process.env */
  readonly environment?: Environment | undefined;
}

/** An installation of NIXL. */
export interface Installed {
  /** Path of `libnixl_capi.so`. */
  readonly library: string;
  /** The installation's folder in the user's cache. */
  readonly folder: string;
  /** NIXL was installed already and has not been changed. */
  readonly existed: boolean;
}

/** Plugin dependencies that can be installed in addition to NIXL. */
export const PLUGIN_DEPENDENCIES = ["libfabric"] as const;
/** One of `PLUGIN_DEPENDENCIES`. */
export type PluginDependency = (typeof PLUGIN_DEPENDENCIES)[number];

/**
 * Installs NIXL into the user's cache, where `nixlTransport` finds it: downloads the pinned wheel
 * with pip as the user has configured it, or takes the file `wheel`, checks its SHA-256, and
 * unpacks its libraries (128 MB). When it is installed already, returns at once without a check of
 * the files, unless `force` is set. Two processes may do this at the same time. Rejects with
 * `KV_INSTALL_FAILED` and the command that would help.
 */
export async function installNixl(options: InstallOptions = {}): Promise<Installed> {
  const installed = await installWheel(options);
  const { environment = process.env, onProgress = () => {} } = options;
  for (const dependency of options.with ?? []) {
    if (dependency !== "libfabric") {
      throw new KvError(
        "KV_INSTALL_FAILED",
        `${JSON.stringify(dependency)} is not one of ${PLUGIN_DEPENDENCIES.join(", ")}`,
      );
    }
    await installLibfabric({ libraryPath: installed.library, environment, onProgress });
  }
  return installed;
}

async function installWheel(options: InstallOptions): Promise<Installed> {
  const {
    version = DEFAULT_VERSION,
    cuda = 12,
    force = false,
    environment = process.env,
  } = options;
  const { onProgress = () => {} } = options;
  requireGlibcLinux();
  const wheel = wheelFor(version, cuda, process.arch);
  const cache = requireCacheFolder(environment);
  const folder = join(cache, wheel.folder);
  const library = join(folder, wheel.folders[0] ?? "", LIBRARY_FILE);
  // A folder gets its name only when it is complete.
  if (!force && (await exists(library))) return { library, folder, existed: true };

  const download = (work: string): Promise<VerifiedWheel> => {
    onProgress(`downloading ${wheel.requirement} for ${wheel.platform} with pip (69 MB)`);
    return downloadWheel(wheel, join(work, "wheel"), environment, onProgress);
  };
  const make = async (unpacked: string, work: string) => {
    const verified =
      options.wheel === undefined
        ? await download(work)
        : await readVerified(options.wheel, wheel, otherWheelHint(wheel));
    onProgress("the SHA-256 is correct; unpacking the libraries (133 MB)");
    await unpackWheel({ wheel: verified, folders: wheel.folders, into: unpacked });
    if (!(await exists(join(unpacked, wheel.folders[0] ?? "", LIBRARY_FILE)))) {
      throw new KvError(
        "KV_INSTALL_FAILED",
        `${wheel.requirement} does not contain ${LIBRARY_FILE}`,
      );
    }
  };
  await makeInCache(wheel.folder, environment, make, { replace: force });
  onProgress(`installed ${library}`);
  return { library, folder, existed: false };
}

/** How to get the wheel on a machine with a package index. */
const otherWheelHint = (wheel: Wheel): string =>
  `download it on another machine: python3 -m pip ${downloadCommand(wheel).join(" ")}; --version and --cuda select another pinned wheel`;

function requireGlibcLinux(): void {
  const problem = cLibraryProblem(process.platform, glibcVersion());
  if (problem === undefined) return;
  throw new KvError(
    "KV_INSTALL_FAILED",
    `NIXL has no wheels for this machine: it has ${problem.found}`,
    {
      hint: problem.fix,
    },
  );
}
