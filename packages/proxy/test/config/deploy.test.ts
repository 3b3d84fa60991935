import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { type DiscoveredInstances, parseInstanceSpec } from "@kv/fleet";
import { expect, test } from "vitest";
import { parseAllDocuments } from "yaml";
import { parseCli } from "../../src/config/cli-options.js";
import { readSettings } from "../../src/config/settings.js";
import { decodeOk, prefillOk } from "../support/fake-upstream.js";
import { runProxy, upstream } from "../support/set-up.js";

const read = (path: string) =>
  readFileSync(fileURLToPath(new URL(`../../deploy/${path}`, import.meta.url)), "utf8");

interface Manifest {
  kind: string;
  metadata: { name: string };
  data: { "config.json": string };
  spec: {
    selector: Record<string, unknown>;
    ports: { port: number; targetPort?: string }[];
    template: {
      metadata: { labels: Record<string, string> };
      spec: {
        terminationGracePeriodSeconds: number;
        securityContext: { runAsUser: number };
        containers: {
          args?: string[];
          ports: { name: string; containerPort: number }[];
          env: { name: string }[];
          readinessProbe: { httpGet: { path: string; port: string } };
          livenessProbe: { tcpSocket: { port: string } };
          volumeMounts: { name: string; mountPath: string }[];
        }[];
        volumes: { name: string; configMap: { name: string } }[];
      };
    };
  };
}

const documents = parseAllDocuments(read("kubernetes/kv-proxy.yaml"));
const manifests = documents.map((document) => document.toJS() as Manifest);
const of = (kind: string, name: string) => {
  const found = manifests.find((manifest) => manifest.kind === kind && manifest.metadata.name === name);
  if (found === undefined) throw new Error(`there is no ${kind} ${name}`);
  return found;
};

test("the manifests are YAML, each with a kind and a unique name", () => {
  expect(documents.flatMap(({ errors, warnings }) => [...errors, ...warnings])).toEqual([]);
  const names = manifests.map(({ kind, metadata }) => `${kind}/${metadata.name}`);
  expect(new Set(names).size).toBe(names.length);
});

const containerfile = read("Containerfile").replaceAll(/\\\n/g, " ");
const ofImage = (step: string) =>
  JSON.parse(new RegExp(`^${step} (.*)$`, "m").exec(containerfile)?.[1] ?? "[]") as string[];

const pod = of("Deployment", "kv-proxy").spec.template;
const [container] = pod.spec.containers;
if (container === undefined) throw new Error("the Deployment has no container");

/** What kv-proxy reads in the pod: its own arguments or the image's, and the files that the ConfigMap puts there. */
function settingsInPod() {
  const [mount] = container?.volumeMounts ?? [];
  const [volume] = pod.spec.volumes;
  expect(volume?.name).toBe(mount?.name);
  const files = Object.entries(of("ConfigMap", volume?.configMap.name ?? "").data);
  const mounted = new Map(files.map(([name, text]) => [`${mount?.mountPath}/${name}`, text]));
  const readFile = (path: string) => {
    const text = mounted.get(path);
    if (text === undefined) throw new Error(`${path} is not in the pod: ${[...mounted.keys()]}`);
    return text;
  };
  const env = { KV_PROXY_ADMIN_TOKEN: "sixteen letters!" };
  return parseCli(container?.args ?? ofImage("CMD"), { readFile, env });
}

test("the proxy accepts the pod's arguments and configuration, with the token from the environment", () => {
  const { settings, host, port } = settingsInPod();
  expect({ host, port }).toEqual({ host: "0.0.0.0", port: 8000 });
  const { admin, timeouts, discovery } = readSettings(settings);
  expect(container.env.map(({ name }) => name)).toEqual(["KV_PROXY_ADMIN_TOKEN"]);
  expect(container.ports).toEqual([
    { name: "http", containerPort: port },
    { name: "admin", containerPort: admin?.port },
  ]);
  expect(pod.spec.terminationGracePeriodSeconds * 1000).toBeGreaterThan(timeouts.graceMs);
  for (const name of [discovery?.dns?.prefill, discovery?.dns?.decode]) {
    const [service = "", servicePort] = (name ?? "").split(":");
    expect(of("Service", service).spec.ports[0]?.port).toBe(Number(servicePort));
  }
  expect(of("Service", "kv-proxy").spec.selector).toEqual(pod.metadata.labels);
  const exposed = /^EXPOSE (.*)$/m.exec(containerfile)?.[1]?.split(" ").map(Number);
  expect(exposed).toEqual(container.ports.map(({ containerPort }) => containerPort));
});

test("the probes use the proxy's port, and get 200 with a P and a D, else 503", async () => {
  const { httpGet } = container.readinessProbe;
  for (const probed of [httpGet.port, container.livenessProbe.tcpSocket.port])
    expect(container.ports.find(({ name }) => name === probed)?.containerPort).toBe(settingsInPod().port);
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  let found = (_instances: DiscoveredInstances) => {};
  const watch = (update: typeof found) => {
    found = update;
    return { close() {} };
  };
  const { settings } = settingsInPod();
  const { url } = await runProxy({
    ...settings,
    admin: { ...settings.admin, host: "127.0.0.1", port: 0 },
    createDiscovery: () => ({ name: "by hand", watch }),
  });
  const readiness = async () => (await fetch(url + httpGet.path)).status;
  expect(await readiness()).toBe(503);
  found({ prefillers: [parseInstanceSpec(p.url)], decoders: [parseInstanceSpec(d.url)] });
  expect(await readiness()).toBe(200);
});

test("the discovery's role may list and watch pods and EndpointSlices, and nothing else", () => {
  const rbac = parseAllDocuments(read("kubernetes/discovery-rbac.yaml")).map(
    (document) => document.toJS() as { kind: string; metadata: { name: string }; rules?: object[] },
  );
  expect(rbac.map(({ kind }) => kind)).toEqual(["ServiceAccount", "Role", "RoleBinding"]);
  const verbs = ["list", "watch"];
  expect(rbac[1]?.rules).toEqual([
    { apiGroups: [""], resources: ["pods"], verbs },
    { apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], verbs },
  ]);
  expect(rbac[2]).toMatchObject({
    subjects: [{ kind: "ServiceAccount", name: rbac[0]?.metadata.name }],
    roleRef: { kind: "Role", name: rbac[1]?.metadata.name },
  });
});

test("the container file starts the package's program as an unprivileged user", () => {
  const steps = containerfile
    .split("\n")
    .filter((each) => each !== "" && !each.startsWith("#"))
    .map((each) => each.split(" ")[0]);
  expect(steps[0]).toBe("FROM");
  const manifest = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf8")) as {
    bin: Record<string, string>;
  };
  const shipped = manifest.bin["kv-proxy"]?.replace("./", "");
  expect(ofImage("ENTRYPOINT").at(-1)).toBe(`node_modules/@kv/proxy/${shipped}`);
  const [, user] = /^USER ([0-9]+):[0-9]+$/m.exec(containerfile) ?? [];
  expect(Number(user)).toBe(pod.spec.securityContext.runAsUser);
  expect(Number(user)).toBeGreaterThan(0);
});
