import { mkdir, readdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { run } from "../release/tree.js";

/** What Node and NIXL load, and what a pod's `preStop` runs. */
export const WANTED = ["base-files", "coreutils", "libatomic1", "libssl3", "libstdc++6", "zlib1g"];

/** A package of Debian in an image. */
export interface DebianPackage {
  readonly name: string;
  readonly version: string;
  readonly architecture: string;
}

/**
 * Unpacks packages of Debian, with all that they depend on, into an empty folder: no script of
 * theirs runs, and no root is needed. The release is that of this machine.
 */
export async function debianRoot(folder: string): Promise<readonly DebianPackage[]> {
  const work = `${folder}.debian`;
  await mkdir(work, { recursive: true });
  const [status, archives] = [join(work, "status"), join(work, "archives")];
  await writeFile(status, "");
  await mkdir(join(archives, "partial"), { recursive: true });

  // As on a machine where nothing is installed.
  const apt = (...args: string[]) =>
    run(
      "apt-get",
      [
        ...["-o", `Dir::State::status=${status}`],
        ...["-o", `Dir::Cache::archives=${archives}`],
        ...["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="],
        ...args,
      ],
      { cwd: work },
    );
  await apt("--yes", "--download-only", "--no-install-recommends", "install", ...WANTED);

  const packages: DebianPackage[] = [];
  const installed: string[] = [];
  for (const file of (await readdir(archives)).filter((name) => name.endsWith(".deb")).sort()) {
    const path = join(archives, file);
    await run("dpkg-deb", ["--extract", path, folder], { cwd: work });
    const control = await run("dpkg-deb", ["--field", path], { cwd: work });
    const field = (name: string) => new RegExp(`^${name}: (.*)$`, "m").exec(control)?.[1] ?? "";
    packages.push({
      name: field("Package"),
      version: field("Version"),
      architecture: field("Architecture"),
    });
    installed.push(control.replace("\n", "\nStatus: install ok installed\n"));
  }
  // Scanners of images read it.
  await mkdir(join(folder, "var/lib/dpkg"), { recursive: true });
  await writeFile(join(folder, "var/lib/dpkg/status"), installed.join("\n"));
  await rm(work, { recursive: true });
  return packages;
}
