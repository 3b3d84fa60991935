import { createHash, randomUUID } from "node:crypto";
import { createReadStream } from "node:fs";
import { access, mkdir, readdir, rename, rm, stat } from "node:fs/promises";
import { join } from "node:path";
import { pipeline } from "node:stream/promises";
import { KvError } from "@kv/interface";
import { cacheFolder, type Environment, LIBRARY_FILE } from "./library.js";
import { pip, unpackWheel } from "./python.js";
import { type Cuda, DEFAULT_VERSION, PYTHON_VERSION, type Wheel, wheelFor } from "./wheels.js";

export interface InstallOptions {
  /** Version of NIXL; 1.5.0 by default. Only versions whose wheels are pinned here can be installed. */
  version?: string;
  /** Major version of CUDA that the wheel is built for; 12 by default. It runs without CUDA as well. */
  cuda?: Cuda;
  /** Told what is going on, a line at a time. */
  onProgress?: (line: string) => void;
  environment?: Environment;
}

export interface Installed {
  /** Path of `libnixl_capi.so`. */
  library: string;
  folder: string;
  /** It was there already. */
  existed: boolean;
}

const WORK_PREFIX = ".installing-";
const PROGRESS_MS = 2000;

/**
 * Brings NIXL into the user's cache, where `nixlTransport` finds it: the pinned wheel, through pip as the user has set
 * it up, checked by SHA-256, its libraries only (128 MB). Done already, it returns at once; two at a time do not disturb
 * each other. Errors: `KV_INSTALL_FAILED` with the command that would help.
 */
export async function installNixl(options: InstallOptions = {}): Promise<Installed> {
  const { version = DEFAULT_VERSION, cuda = 12, onProgress = () => {}, environment = process.env } = options;
  requireGlibcLinux();
  const wheel = wheelFor(version, cuda, process.arch);
  const cache = cacheFolder(environment);
  const folder = join(cache, wheel.folder);
  const library = join(folder, wheel.folders[0] ?? "", LIBRARY_FILE);
  // A folder appears under its own name only when it is complete.
  if (await exists(library)) return { library, folder, existed: true };

  await mkdir(cache, { recursive: true }).catch((error: Error) => {
    throw new KvError("KV_INSTALL_FAILED", `cannot create ${cache}: ${error.message}`, {
      hint: "set XDG_CACHE_HOME to a folder that can be written",
    });
  });
  await removeLeftovers(cache);
  const work = join(cache, `${WORK_PREFIX}${process.pid}-${randomUUID()}`);
  try {
    const downloaded = join(work, "wheel");
    const unpacked = join(work, "unpacked");
    await mkdir(downloaded, { recursive: true });
    onProgress(`downloading ${wheel.requirement} for ${wheel.platform} with pip (69 MB)`);
    const file = await download(wheel, downloaded, environment, onProgress);
    await verify(file, wheel);
    onProgress("SHA-256 is as pinned; unpacking the libraries (133 MB)");
    await unpackWheel({ file, folders: wheel.folders, into: unpacked, environment });
    if (!(await exists(join(unpacked, wheel.folders[0] ?? "", LIBRARY_FILE)))) {
      throw new KvError("KV_INSTALL_FAILED", `${wheel.requirement} holds no ${LIBRARY_FILE}`);
    }
    await rename(unpacked, folder).catch(async (error: Error) => {
      // Another installation was faster, and what it put there is the same.
      if (!(await exists(library)))
        throw new KvError("KV_INSTALL_FAILED", `cannot create ${folder}: ${error.message}`);
    });
  } finally {
    await rm(work, { recursive: true, force: true });
  }
  onProgress(`installed ${library}`);
  return { library, folder, existed: false };
}

async function download(
  wheel: Wheel,
  into: string,
  environment: Environment,
  onProgress: (line: string) => void,
): Promise<string> {
  // pip writes the wheel into its temporary folder first: how much is there is the progress.
  const temporary = join(into, "..", "pip");
  await mkdir(temporary);
  const timer = setInterval(() => {
    void folderBytes(temporary).then((bytes) => {
      if (bytes > 0) onProgress(`${Math.round(bytes / 1e6)} MB so far`);
    });
  }, PROGRESS_MS);
  const selection = [
    "--no-deps",
    "--only-binary=:all:",
    "--python-version",
    PYTHON_VERSION,
    "--platform",
    wheel.platform,
  ];
  try {
    const around = { ...environment, TMPDIR: temporary };
    await pip(["download", ...selection, wheel.requirement], ["--dest", into], {
      environment: around,
      onProgress,
    });
  } finally {
    clearInterval(timer);
  }
  const files = (await readdir(into)).filter((name) => name.endsWith(".whl"));
  const [file] = files;
  if (file === undefined || files.length !== 1) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `pip left ${files.length} wheels for ${wheel.requirement}, not one`,
    );
  }
  return join(into, file);
}

async function folderBytes(folder: string): Promise<number> {
  const names = await readdir(folder, { recursive: true }).catch(() => []);
  const sizes = await Promise.all(
    names.map((name) =>
      stat(join(folder, name)).then(
        (entry) => (entry.isFile() ? entry.size : 0),
        () => 0,
      ),
    ),
  );
  return sizes.reduce((sum, size) => sum + size, 0);
}

async function verify(file: string, wheel: Wheel): Promise<void> {
  const hash = createHash("sha256");
  await pipeline(createReadStream(file), hash);
  const actual = hash.digest("hex");
  if (actual === wheel.sha256) return;
  throw new KvError(
    "KV_INSTALL_FAILED",
    `the wheel of ${wheel.requirement} has SHA-256 ${actual}, and ${wheel.sha256} is pinned: it is not used`,
    { hint: "look at the index that pip uses: python3 -m pip config list" },
  );
}

/** What runs that were killed have left, told by their process being gone. */
async function removeLeftovers(cache: string): Promise<void> {
  for (const name of await readdir(cache)) {
    const pid = name.startsWith(WORK_PREFIX)
      ? Number.parseInt(name.slice(WORK_PREFIX.length), 10)
      : Number.NaN;
    if (Number.isNaN(pid) || isAlive(pid)) continue;
    await rm(join(cache, name), { recursive: true, force: true });
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "EPERM";
  }
}

async function exists(path: string): Promise<boolean> {
  return access(path).then(
    () => true,
    () => false,
  );
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
