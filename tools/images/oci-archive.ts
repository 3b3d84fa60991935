import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { mkdir, rename, rm, stat, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { run } from "../release/tree.js";

/** One folder is one layer. */
export interface Image {
  /** Such as `kv-proxy:0.1.0`. */
  readonly reference: string;
  readonly layers: readonly string[];
  /** `config` of the OCI image specification 1.1. */
  readonly config: object;
  readonly labels: Readonly<Record<string, string>>;
}

const ARCHITECTURES: Readonly<Record<string, string>> = { x64: "amd64", arm64: "arm64" };

/** The same files give the same archive. */
const REPRODUCIBLE = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"];

/** Writes an OCI archive, which `podman load`, `docker load` and `skopeo` read. */
export async function writeOciArchive(file: string, image: Image): Promise<void> {
  const work = `${file}.oci`;
  const blobs = join(work, "blobs/sha256");
  await rm(work, { recursive: true, force: true });
  await mkdir(blobs, { recursive: true });

  const blob = async (path: string, mediaType: string) => {
    const [hash, { size }] = [await sha256(path), await stat(path)];
    await rename(path, join(blobs, hash));
    return { mediaType, digest: `sha256:${hash}`, size };
  };
  const json = async (value: object, mediaType: string) => {
    const path = join(work, "json");
    await writeFile(path, JSON.stringify(value));
    return blob(path, mediaType);
  };

  const layers: object[] = [];
  const diffIds: string[] = [];
  for (const folder of image.layers) {
    const tar = join(work, "layer.tar");
    await run("tar", [...REPRODUCIBLE, "--create", "--file", tar, "."], { cwd: folder });
    diffIds.push(`sha256:${await sha256(tar)}`);
    // Without a name and a time, so that it is the same each time.
    await run("gzip", ["--no-name", tar], { cwd: work });
    layers.push(await blob(`${tar}.gz`, "application/vnd.oci.image.layer.v1.tar+gzip"));
  }

  const config = await json(
    {
      architecture: ARCHITECTURES[process.arch],
      os: "linux",
      config: { ...image.config, Labels: image.labels },
      rootfs: { type: "layers", diff_ids: diffIds },
    },
    "application/vnd.oci.image.config.v1+json",
  );
  const manifest = await json(
    {
      schemaVersion: 2,
      mediaType: "application/vnd.oci.image.manifest.v1+json",
      config,
      layers,
      annotations: image.labels,
    },
    "application/vnd.oci.image.manifest.v1+json",
  );
  const annotations = { "org.opencontainers.image.ref.name": image.reference };
  const index = { schemaVersion: 2, manifests: [{ ...manifest, annotations }] };
  await writeFile(join(work, "index.json"), JSON.stringify(index));
  await writeFile(join(work, "oci-layout"), JSON.stringify({ imageLayoutVersion: "1.0.0" }));

  const files = ["oci-layout", "index.json", "blobs"];
  await run("tar", [...REPRODUCIBLE, "--create", "--file", `${work}.tar`, ...files], { cwd: work });
  await rm(work, { recursive: true });
  await rename(`${work}.tar`, file);
}

export async function sha256(path: string): Promise<string> {
  const hash = createHash("sha256");
  for await (const chunk of createReadStream(path)) hash.update(chunk as Buffer);
  return hash.digest("hex");
}
