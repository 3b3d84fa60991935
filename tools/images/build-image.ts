import { chmod, copyFile, cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { packForInstall } from "../pack/install.js";
import { licenseProblems, noticesOf, type Sbom, sbomOf } from "../release/notices.js";
import { readManifest, root } from "../release/packages.js";
import { CONTAINER_NODE, containerNode } from "../release/registry.js";
import { run } from "../release/tree.js";
import { configOf, IMAGES, type ImageName, readContainerfile } from "./containerfile.js";
import { type DebianPackage, debianRoot } from "./debian-root.js";
import { writeOciArchive } from "./oci-archive.js";

/** Where an image has its list of parts (CycloneDX) and the licenses of others. */
export const SBOM = "usr/share/doc/kv/sbom.cdx.json";
export const NOTICES = "usr/share/doc/kv/THIRD_PARTY_NOTICES.md";

/** The Debian release of the container files' base. */
const RELEASE = "bookworm";

const NPM = {
  ...process.env,
  npm_config_prefer_offline: "true",
  npm_config_audit: "false",
  npm_config_fund: "false",
};

/**
 * Builds images as their container files say, without a container engine: packages of Debian, Node
 * from npm, and what npm installs from our tarballs. Returns the archives' paths.
 */
export async function buildImages(
  names: readonly string[],
  folder: string,
  say: (line: string) => void,
): Promise<readonly string[]> {
  const unknown = names.find((name) => !IMAGES.some((image) => image.name === name));
  if (unknown !== undefined)
    throw new Error(`${unknown}: the images are ${IMAGES.map(({ name }) => name).join(", ")}`);
  const work = join(folder, "work");
  await rm(work, { recursive: true, force: true });
  const base = join(work, "base");
  const packages = await layBase(base);
  const archives: string[] = [];
  for (const image of IMAGES.filter(({ name }) => names.includes(name))) {
    const layer = join(work, image.name);
    await layProgram(image, layer, packages, say);
    archives.push(await archiveOf(image.name, [base, layer], folder));
  }
  await rm(work, { recursive: true });
  return archives;
}

async function layProgram(
  image: (typeof IMAGES)[number],
  layer: string,
  packages: readonly DebianPackage[],
  say: (line: string) => void,
): Promise<void> {
  const app = join(layer, "app");
  await mkdir(app, { recursive: true });
  const tarballs = `${layer}.tarballs`;
  await packForInstall([image.package], tarballs, say);
  for (const tarball of await readdir(tarballs))
    await copyFile(join(tarballs, tarball), join(app, tarball));
  await run("sh", ["-c", readContainerfile(image.name).install], { cwd: app, env: NPM });
  await describeParts(app, layer, packages);
}

async function archiveOf(name: ImageName, layers: readonly string[], folder: string) {
  const { version, license = "" } = readManifest(join(root, "packages", name.replace("kv-", "")));
  const file = join(folder, `${name}-${version}.tar`);
  await writeOciArchive(file, {
    reference: `${name}:${version}`,
    layers,
    config: configOf(readContainerfile(name)),
    labels: {
      "org.opencontainers.image.title": name,
      "org.opencontainers.image.version": version,
      "org.opencontainers.image.licenses": license,
    },
  });
  return file;
}

async function layBase(base: string): Promise<readonly DebianPackage[]> {
  await mkdir(base, { recursive: true });
  const packages = await debianRoot(base);
  const release = await readFile(join(base, "usr/lib/os-release"), "utf8");
  if (!release.includes(`VERSION_CODENAME=${RELEASE}\n`))
    throw new Error(`images are made of Debian ${RELEASE}, and apt gives another release here`);

  const node = await containerNode();
  await mkdir(join(base, "usr/local/bin"), { recursive: true });
  await copyFile(node, join(base, "usr/local/bin/node"));
  await mkdir(join(base, "usr/share/doc/node"), { recursive: true });
  await cp(join(node, "../../LICENSE"), join(base, "usr/share/doc/node/copyright"));

  await mkdir(join(base, "tmp"), { recursive: true });
  await chmod(join(base, "tmp"), 0o1777);
  await writeFile(
    join(base, "etc/passwd"),
    "root:x:0:0:root:/root:/bin/false\nnode:x:1000:1000::/tmp:/bin/false\n",
  );
  await writeFile(join(base, "etc/group"), "root:x:0:\nnode:x:1000:\n");
  return packages;
}

/** Writes the list of parts and the licenses. */
async function describeParts(app: string, layer: string, packages: readonly DebianPackage[]) {
  const sbom = await sbomOf(app);
  const problems = licenseProblems(sbom);
  if (problems.length > 0) throw new Error(problems.join("\n"));
  const others = [
    { name: "node", version: CONTAINER_NODE, purl: `pkg:generic/node@${CONTAINER_NODE}` },
    ...packages.map(({ name, version, architecture }) => ({
      name,
      version,
      purl: `pkg:deb/debian/${name}@${encodeURIComponent(version)}?arch=${architecture}`,
    })),
  ];
  const components = [
    ...sbom.components,
    ...others.map((each) => ({ type: "library", "bom-ref": each.purl, ...each })),
  ];
  await mkdir(join(layer, "usr/share/doc/kv"), { recursive: true });
  const whole: Sbom = { ...sbom, components };
  await writeFile(join(layer, SBOM), JSON.stringify(whole, undefined, 1));
  await writeFile(join(layer, NOTICES), noticesOf(app, sbom));
}
