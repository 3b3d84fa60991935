import { join } from "node:path";
import { KvError } from "@kv/interface";
import type { Environment } from "../environment.js";
import { cLibraryProblem, glibcVersion } from "../library/c-library.js";
import {
  exists,
  makeInCache,
  requireCacheFolder,
  selectInstallation,
} from "../library/cache-folder.js";
import { installations, LIBRARY_FILE } from "../library/find-library.js";
import { requireOptions } from "../validate.js";
import {
  downloadCommand,
  downloadWheel,
  readVerified,
  type VerifiedWheel,
} from "./download-wheel.js";
import { unpackWheel } from "./unpack-wheel.js";
import { type Cuda, DEFAULT_VERSION, type Wheel, wheelFor } from "./wheels.js";

/** Options of `installNixl`. */
export interface InstallOptions {
  /** Version of NIXL; this package must pin its wheels. @default "1.5.0" */
  readonly version?: string | undefined;
  /** Major version of CUDA that the wheel is built for. It also works without CUDA. @default 12 */
  readonly cuda?: Cuda | undefined;
  /**
   * Path of the wheel, for a machine without a package index. Its SHA-256 must be the pinned one.
   * @default pip downloads the wheel
   */
  readonly wheel?: string | undefined;
  /** Replace an existing installation, such as a damaged one. @default false */
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
  /** NIXL was installed already and was not changed. */
  readonly existed: boolean;
}

/**
 * Installs NIXL into the user's cache and selects it for `nixlTransport`. Takes `wheel`, or
 * downloads the pinned wheel with the user's pip, checks its SHA-256 and unpacks its libraries (128
 * MB). Without `force` an installed NIXL is only selected, not checked. Two processes may do this
 * at once. Rejects with `KV_INSTALL_FAILED` and a command that helps.
 */
export async function installNixl(options: InstallOptions = {}): Promise<Installed> {
  requireOptions(options, "KV_INSTALL_FAILED", "the options of installNixl", [
    "version",
    "cuda",
    "wheel",
    "force",
    "onProgress",
    "environment",
  ]);
  const { version = DEFAULT_VERSION, cuda = 12, force = false } = options;
  const { environment = process.env, onProgress = () => {} } = options;
  requireGlibcLinux();
  const wheel = wheelFor(version, cuda, process.arch);
  const cache = requireCacheFolder(environment);
  const folder = join(cache, wheel.folder);
  const library = join(folder, wheel.folders[0] ?? "", LIBRARY_FILE);
  // A folder gets its name only when it is complete.
  if (!force && (await exists(library))) {
    await selectInstallation(wheel.folder, environment);
    return { library, folder, existed: true };
  }

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
  await selectInstallation(wheel.folder, environment);
  onProgress(`installed ${library}`);
  return { library, folder, existed: false };
}

/**
 * Selects an installed NIXL from now on and returns its folder's name. Rejects with
 * `KV_INSTALL_FAILED` where it is not installed.
 */
export async function useNixl(
  version: string,
  cuda: Cuda,
  environment: Environment = process.env,
): Promise<string> {
  const installed = await installations(requireCacheFolder(environment));
  const name = installed.find((folder) => folder.startsWith(`nixl-cu${cuda}-${version}-`));
  if (name === undefined) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `NIXL ${version} for CUDA ${cuda} is not installed; there are ${installed.join(", ") || "none"}`,
      { hint: `npx --no-install kv-nixl install --version ${version} --cuda ${cuda}` },
    );
  }
  await selectInstallation(name, environment);
  return name;
}

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
