// A long suite: builds the images, and runs each without a container engine: in namespaces of its
// own, as an ordinary user, on a root that nothing can write to.

import { type ChildProcess, spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
} from "node:fs";
import { writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { freePort } from "@kv/testing/http/listening";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { root } from "../release/packages.js";
import { CONTAINER_NODE } from "../release/registry.js";
import { run } from "../release/tree.js";
import { buildImages, NOTICES, SBOM } from "./build-image.js";
import { IMAGES, readContainerfile } from "./containerfile.js";
import { WANTED } from "./debian-root.js";
import { sha256 } from "./oci-archive.js";

const hasUserNamespaces =
  spawnSync("unshare", ["--user", "--map-root-user", "--mount", "true"]).status === 0;
const isDebian = spawnSync("dpkg-deb", ["--version"]).status === 0;
const missing = isDebian
  ? hasUserNamespaces
    ? undefined
    : "no user namespaces"
  : "dpkg-deb is missing";

/** What a manifest of deploy/ gives each of them, in bytes. */
const MEMORY = 1 << 30;

interface Descriptor {
  readonly digest: string;
  readonly annotations?: Readonly<Record<string, string>>;
}

interface Unpacked {
  /** Its file system. */
  readonly folder: string;
  readonly reference: string | undefined;
  readonly config: {
    readonly User: string;
    readonly WorkingDir: string;
    readonly Env: readonly string[];
    readonly ExposedPorts: Readonly<Record<string, object>>;
    readonly Entrypoint: readonly string[];
    readonly Cmd: readonly string[];
  };
}

const work = scratchFolder();
const images = new Map<string, Unpacked>();

beforeAll(async () => {
  if (missing !== undefined) return;
  const archives = await buildImages(
    IMAGES.map(({ name }) => name),
    work,
    () => {},
  );
  for (const archive of archives)
    images.set(basename(archive).replace(/-[\d.]+\.tar$/, ""), await unpack(archive));
}, 900_000);

/** As a container engine does: each blob is checked against its digest. */
async function unpack(archive: string): Promise<Unpacked> {
  const blobs = `${archive}.unpacked`;
  const folder = join(blobs, "files");
  mkdirSync(folder, { recursive: true });
  await run("tar", ["--extract", "--file", archive], { cwd: blobs });
  const blobAt = async ({ digest }: Descriptor) => {
    const path = join(blobs, "blobs", digest.replace(":", "/"));
    expect(`sha256:${await sha256(path)}`).toBe(digest);
    return path;
  };
  const read = async <T>(descriptor: Descriptor) =>
    JSON.parse(readFileSync(await blobAt(descriptor), "utf8")) as T;

  const layout = readFileSync(join(blobs, "oci-layout"), "utf8");
  expect(JSON.parse(layout)).toEqual({ imageLayoutVersion: "1.0.0" });
  const index = JSON.parse(readFileSync(join(blobs, "index.json"), "utf8")) as {
    readonly manifests: readonly [Descriptor];
  };
  const manifest = await read<{ readonly config: Descriptor; readonly layers: Descriptor[] }>(
    index.manifests[0],
  );
  const { config, rootfs } = await read<{
    readonly config: Unpacked["config"];
    readonly rootfs: { readonly diff_ids: readonly string[] };
  }>(manifest.config);
  for (const [number, layer] of manifest.layers.entries()) {
    const tar = join(blobs, "layer.tar");
    await run("sh", ["-c", `gzip -dc ${await blobAt(layer)} > ${tar}`], { cwd: blobs });
    expect(`sha256:${await sha256(tar)}`).toBe(rootfs.diff_ids[number]);
    await run("tar", ["--extract", "--file", tar], { cwd: folder });
  }
  const reference = index.manifests[0].annotations?.["org.opencontainers.image.ref.name"];
  return { folder, reference, config };
}

function imageOf(name: string): Unpacked {
  const image = images.get(name);
  if (image === undefined) throw new Error(`${name} was not built`);
  return image;
}

/** Mounts the root read-only, with what a container has of the host, and a folder at /mnt; then becomes user 1000. */
const START = `
set -e
root=$1; mounted=$2; memory=$3; shift 3
mount --bind "$root" "$root"
mount --rbind /proc "$root/proc"
mount --rbind /sys "$root/sys"
for each in tmp dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root/$each"; done
for each in null urandom; do mount --bind /dev/$each "$root/dev/$each"; done
if [ -n "$mounted" ]; then mount --bind "$mounted" "$root/mnt"; fi
mount -o remount,bind,ro "$root"
cd "$root"
exec prlimit --data=$memory unshare --user --map-user=1000 --map-group=1000 --root="$root" --wd=/app env -i "$@"
`;

/** A kubeconfig with an API server that nobody runs: a program waits for it. */
const NO_CLUSTER = {
  apiVersion: "v1",
  kind: "Config",
  "current-context": "none",
  clusters: [{ name: "none", cluster: { server: "http://127.0.0.1:9" } }],
  contexts: [{ name: "none", context: { cluster: "none", user: "none" } }],
  users: [{ name: "none", user: {} }],
};

/** Starts a container of an image; the folder `mounted` is at /mnt. */
function start(
  { folder, config }: Unpacked,
  args: readonly string[],
  { mounted = "", env = [] }: { readonly mounted?: string; readonly env?: readonly string[] } = {},
): ChildProcess {
  for (const each of ["proc", "sys", "dev/shm", "mnt"])
    mkdirSync(join(folder, each), { recursive: true });
  for (const device of ["null", "urandom"]) closeSync(openSync(join(folder, "dev", device), "a"));
  const command = [...config.Env, ...env, ...config.Entrypoint, ...args];
  return spawn(
    "unshare",
    [
      ...["--user", "--map-root-user", "--mount", "sh", "-c", START, "sh"],
      ...[folder, mounted, `${MEMORY}`, ...command],
    ],
    { stdio: ["ignore", "pipe", "pipe"] },
  );
}

async function output(child: ChildProcess) {
  const texts = { stdout: "", stderr: "" };
  for (const stream of ["stdout", "stderr"] as const)
    child[stream]?.on("data", (chunk) => {
      texts[stream] += chunk;
    });
  const [code] = await once(child, "close");
  return { code, ...texts };
}

/** Resolves with the first line on stdout. */
async function firstLine(child: ChildProcess): Promise<string> {
  let log = "";
  child.stderr?.on("data", (chunk) => {
    log = `${log}${chunk}`.slice(-4_000);
  });
  const ended = once(child, "exit").then(() => {
    throw new Error(log);
  });
  ended.catch(() => {});
  return String(
    (await Promise.race([once(child.stdout as NodeJS.ReadableStream, "data"), ended]))[0],
  );
}

describe.each(IMAGES)("deploy/containers/$name", ({ name }) => {
  test("has two stages of the same Node, and ends with an ordinary user", () => {
    const { from, last } = readContainerfile(name);
    const [major] = CONTAINER_NODE.split(".");
    const base = `docker.io/library/node:${major}-bookworm-slim`;
    expect(from).toEqual([`${base} AS install`, base]);
    const [installed = ""] = last.flatMap(({ instruction, rest }) =>
      instruction === "RUN" ? [/--no-install-recommends ([^&]+) &&/.exec(rest)?.[1] ?? "?"] : [],
    );
    expect(WANTED).toEqual(expect.arrayContaining(installed.split(" ").filter(Boolean)));
    const others = last
      .map(({ instruction }) => instruction)
      .filter((each) => each !== "EXPOSE" && each !== "RUN");
    expect(others).toEqual(["WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"]);
  });
});

describe.skipIf(missing)(`images (${missing ?? "found"})`, () => {
  test.each(IMAGES)("$name is what its container file says", ({ name }) => {
    const { config, reference } = imageOf(name);
    expect(reference).toMatch(new RegExp(`^${name}:\\d+\\.\\d+\\.\\d+$`));
    expect(config).toMatchObject({ User: "1000:1000", WorkingDir: "/app" });
    expect(config.Env).toContain("NODE_ENV=production");
  });

  test.each(IMAGES)("$name has a list of its parts, and the license of each", ({ name }) => {
    const { folder } = imageOf(name);
    const { bomFormat, components } = JSON.parse(readFileSync(join(folder, SBOM), "utf8")) as {
      readonly bomFormat: string;
      readonly components: readonly { readonly name: string; readonly version: string }[];
    };
    expect(bomFormat).toBe("CycloneDX");
    const listed = components.map((each) => `${each.name}@${each.version}`).sort();

    const manifests = readdirSync(join(folder, "app"), {
      recursive: true,
      encoding: "utf8",
    }).filter((path) => /node_modules\/(@[^/]+\/)?[^/]+\/package\.json$/.test(path));
    const installed = manifests.map((path) => {
      const manifest = JSON.parse(readFileSync(join(folder, "app", path), "utf8"));
      return `${manifest.name}@${manifest.version}`;
    });
    const status = readFileSync(join(folder, "var/lib/dpkg/status"), "utf8");
    const debian = status.split(/\n\n+/).map((text) => {
      const field = (wanted: string) => new RegExp(`^${wanted}: (.*)$`, "m").exec(text)?.[1];
      return { name: field("Package"), version: field("Version") };
    });
    const present = [
      ...installed,
      `node@${CONTAINER_NODE}`,
      ...debian.map((each) => `${each.name}@${each.version}`),
    ];
    expect(listed).toEqual([...new Set(present)].sort());

    for (const each of debian)
      expect(existsSync(join(folder, `usr/share/doc/${each.name}/copyright`)), each.name).toBe(
        true,
      );
    expect(existsSync(join(folder, "usr/share/doc/node/copyright"))).toBe(true);
    const notices = readFileSync(join(folder, NOTICES), "utf8");
    for (const path of manifests) {
      const { name: of } = JSON.parse(readFileSync(join(folder, "app", path), "utf8"));
      if (!of.startsWith("@kv/")) expect(notices).toContain(`## ${of}\n`);
    }
    expect(readdirSync(join(folder, "app")).filter((file) => file.endsWith(".tgz"))).toEqual([]);
  });

  test.each([
    { name: "kv-proxy", shape: "proxy", path: "/health", status: 503 },
    { name: "kv-epp", shape: "envoy", path: "/metrics", status: 200 },
  ])(
    "$name serves with its manifest's settings, as user 1000, on a read-only root, and ends at SIGTERM",
    async ({ name, shape, path, status }) => {
      const image = imageOf(name);
      const mounted = mkdtempSync(join(work, "mounted-"));
      const [asked, second, third] = [await freePort(), await freePort(), await freePort()];
      const host = "127.0.0.1";
      const places =
        name === "kv-proxy"
          ? { port: asked, admin: { host, port: second } }
          : { port: second, healthPort: third, metricsServer: { host, port: asked } };
      const given = JSON.parse(
        readFileSync(join(root, `deploy/${shape}/config.json`), "utf8"),
      ) as object;
      const config = { ...given, host, ...places, timeouts: { graceMs: 1000 } };
      await writeFile(join(mounted, "config.json"), JSON.stringify(config));
      await writeFile(join(mounted, "kubeconfig"), JSON.stringify(NO_CLUSTER));

      const child = start(image, ["--config", "/mnt/config.json"], {
        mounted,
        env: ["KUBECONFIG=/mnt/kubeconfig", `KV_PROXY_ADMIN_TOKEN=${"0".repeat(32)}`],
      });
      try {
        expect(await firstLine(child)).toMatch(new RegExp(`^${name} ready `));
        expect((await fetch(`http://${host}:${asked}${path}`)).status).toBe(status);
        const exited = once(child, "exit");
        child.kill("SIGTERM");
        expect((await exited)[0]).toBe(0);
      } finally {
        child.kill("SIGKILL");
      }
    },
    60_000,
  );

  test.each(["kv-peer", "kv-pool"])(
    "%s loads NIXL, and can write nothing to its root",
    async (name) => {
      const image = imageOf(name);
      const help = await output(start(image, image.config.Cmd));
      expect(help).toMatchObject({ code: 0, stderr: "" });
      const loads = `
      const { nixlTransport } = await import("/app/node_modules/@kv/nixl/dist/index.js");
      const transport = nixlTransport({ backends: ["UCX"] });
      const agent = await transport.createAgent({ name: "one" });
      await transport.close();
      const { writeFileSync } = await import("node:fs");
      let refused = "";
      try { writeFileSync("/app/written", "") } catch (error) { refused = error.code }
      console.log(agent.name, refused, process.getuid());`;
      const node = { ...image, config: { ...image.config, Entrypoint: ["node"] } };
      const loaded = await output(start(node, ["--input-type=module", "--eval", loads]));
      expect(loaded).toEqual({ code: 0, stdout: "one EROFS 1000\n", stderr: "" });
    },
    60_000,
  );
});
