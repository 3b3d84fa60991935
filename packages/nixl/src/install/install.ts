import { join } from "node:path";
import { KvError } from "@kv/interface";
import { exists, makeInCache } from "../library/cache-folder.js";
import { cacheFolder, type Environment, LIBRARY_FILE } from "../library/find-library.js";
import { downloadWheel } from "./download-wheel.js";
import { installLibfabric } from "./install-libfabric.js";
import { unpackWheel } from "./pip.js";
import { type Cuda, DEFAULT_VERSION, wheelFor } from "./wheels.js";

export interface InstallOptions {
  /** Version of NIXL; 1.5.0 by default. Only versions whose wheels are pinned here can be installed. */
  version?: string;
  /** Major version of CUDA that the wheel is built for; 12 by default. It runs without CUDA as well. */
  cuda?: Cuda;
  /** What a plugin needs from outside the wheel: `libfabric` for LIBFABRIC. Nothing by default. */
  with?: readonly Companion[];
  /** Fetch NIXL and replace it although it is there, such as when a file of it is damaged. False by default. */
  force?: boolean;
  /** Told what is going on, a line at a time. */
  onProgress?: (line: string) => void;
  environment?: Environment;
}

export interface Installed {
  /** Path of `libnixl_capi.so`. */
  library: string;
  folder: string;
  /** NIXL was there already, and was left as it is. */
  existed: boolean;
}

/** What can be brought beside NIXL. */
export const COMPANIONS = ["libfabric"] as const;
export type Companion = (typeof COMPANIONS)[number];

/**
 * Brings NIXL into the user's cache, where `nixlTransport` finds it: the pinned wheel, through pip as the user has set
 * it up, checked by SHA-256, its libraries only (128 MB). Done already, it returns at once and looks no further, but for
 * `force`; two at a time do not disturb each other. Errors: `KV_INSTALL_FAILED` with the command that would help.
 */
export async function installNixl(options: InstallOptions = {}): Promise<Installed> {
  const installed = await installWheel(options);
  const { environment = process.env, onProgress = () => {} } = options;
  for (const companion of options.with ?? []) {
    if (companion !== "libfabric") {
      throw new KvError(
        "KV_INSTALL_FAILED",
        `${JSON.stringify(companion)} is not one of ${COMPANIONS.join(", ")}`,
      );
    }
    await installLibfabric({ libraryPath: installed.library, environment, onProgress });
  }
  return installed;
}

async function installWheel(options: InstallOptions): Promise<Installed> {
  const { version = DEFAULT_VERSION, cuda = 12, force = false, environment = process.env } = options;
  const { onProgress = () => {} } = options;
  requireGlibcLinux();
  const wheel = wheelFor(version, cuda, process.arch);
  const cache = cacheFolder(environment);
  const folder = join(cache, wheel.folder);
  const library = join(folder, wheel.folders[0] ?? "", LIBRARY_FILE);
  // A folder appears under its own name only when it is complete.
  if (!force && (await exists(library))) return { library, folder, existed: true };

  const make = async (unpacked: string, work: string) => {
    onProgress(`downloading ${wheel.requirement} for ${wheel.platform} with pip (69 MB)`);
    const file = await downloadWheel(wheel, join(work, "wheel"), environment, onProgress);
    onProgress("SHA-256 is as pinned; unpacking the libraries (133 MB)");
    await unpackWheel({ file, folders: wheel.folders, into: unpacked, environment });
    if (!(await exists(join(unpacked, wheel.folders[0] ?? "", LIBRARY_FILE)))) {
      throw new KvError("KV_INSTALL_FAILED", `${wheel.requirement} holds no ${LIBRARY_FILE}`);
    }
  };
  await makeInCache(wheel.folder, environment, make, { replace: force });
  onProgress(`installed ${library}`);
  return { library, folder, existed: false };
}

function requireGlibcLinux(): void {
  const report = process.platform === "linux" ? process.report.getReport() : undefined;
  const header = (report as { header?: { glibcVersionRuntime?: string } } | undefined)?.header;
  if (header?.glibcVersionRuntime === undefined) {
    const system = process.platform === "linux" ? "Linux without glibc" : process.platform;
    throw new KvError("KV_INSTALL_FAILED", `NIXL has no wheels for ${system}: it runs on Linux with glibc`, {
      hint: "use @kv/transport-memory here",
    });
  }
}
