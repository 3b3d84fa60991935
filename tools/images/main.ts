// npm run images [-- NAME… --out FOLDER]: builds the container images as OCI archives, by default
// all into build/images. No container engine and no root is needed; Debian's apt and dpkg are.
import { mkdir } from "node:fs/promises";
import { resolve } from "node:path";
import { parseArgs } from "node:util";
import { root } from "../release/packages.js";
import { buildImages } from "./build-image.js";
import { IMAGES } from "./containerfile.js";

try {
  const { values, positionals } = parseArgs({
    options: { out: { type: "string", default: "build/images" } },
    allowPositionals: true,
  });
  const folder = resolve(root, values.out);
  await mkdir(folder, { recursive: true });
  const names = positionals.length > 0 ? positionals : IMAGES.map(({ name }) => name);
  const say = (line: string) => process.stderr.write(`${line}\n`);
  for (const archive of await buildImages(names, folder, say)) process.stdout.write(`${archive}\n`);
} catch (error) {
  process.stderr.write(`images: ${(error as Error).message}\n`);
  process.exitCode = 2;
}
