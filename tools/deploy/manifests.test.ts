import { describe, expect, test } from "vitest";
import { parseCli as parseEpp } from "../../packages/epp/src/config/cli-options.js";
import { readSettings as readEppSettings } from "../../packages/epp/src/config/settings.js";
import { parseCli as parseProxy } from "../../packages/proxy/src/config/cli-options.js";
import { readSettings as readProxySettings } from "../../packages/proxy/src/config/settings.js";
import {
  buildShape,
  type Container,
  type KubernetesObject,
  type PodTemplate,
  reachablePorts,
  SHAPES,
  type Shape,
  selects,
} from "./kubernetes-objects.js";

const built = new Map(SHAPES.map((shape) => [shape, buildShape(shape)] as const));
const missing =
  built.get("proxy") === undefined ? "kustomize is missing: npm run lint:deploy" : undefined;

/** Flags of vLLM 0.33 that the manifests use. */
const VLLM_FLAGS = [
  "--port",
  "--kv-transfer-config",
  "--kv-events-config",
  "--enable-scale-out",
  "--tensor-parallel-size",
  "--data-parallel-size",
];
/** KV events, side channels and replays of a server's ranks. */
const RANK_PORTS = [5557, 5558, 5600, 5601, 5602, 5603, 5604, 5605, 5606, 5607, 5657, 5658];
/** Members of vLLM 0.33's KVTransferConfig and KVEventsConfig. */
const TRANSFER_MEMBERS = [
  "kv_connector",
  "kv_role",
  "kv_load_failure_policy",
  "kv_connector_extra_config",
];
const EVENTS_MEMBERS = ["enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"];

interface Placed {
  readonly container: Container;
  readonly pod: PodTemplate;
}

/**
 * What a program reads in its pod: its arguments with variables replaced, the files that ConfigMaps
 * put there, and its environment.
 */
function insidePod(objects: readonly KubernetesObject[], { container, pod }: Placed) {
  const configMap = (name: string) => {
    const found = objects.find(
      ({ kind, metadata }) => kind === "ConfigMap" && metadata.name === name,
    );
    if (found?.data === undefined) throw new Error(`there is no ConfigMap ${name}`);
    return found.data;
  };
  const env = Object.fromEntries(
    (container.env ?? []).map(({ name, value, valueFrom }) => {
      const from = valueFrom?.configMapKeyRef;
      // The rest are the pod's address and the admin token.
      const given =
        from === undefined ? (value ?? "10.0.0.1 of 16 signs") : configMap(from.name)[from.key];
      if (given === undefined) throw new Error(`${from?.name} has no key ${from?.key}`);
      return [name, name.endsWith("_IP") ? "10.0.0.1" : given];
    }),
  );
  const args = container.args.map((argument) =>
    argument.replaceAll(/\$\(([A-Z_]+)\)/g, (_, name: string) => {
      const value = env[name];
      if (value === undefined)
        throw new Error(`${argument} of ${container.name}: there is no variable ${name}`);
      return value;
    }),
  );
  const readFile = (path: string) => {
    const mount = container.volumeMounts.find(({ mountPath }) => path.startsWith(`${mountPath}/`));
    const volume = pod.spec.volumes.find(({ name }) => name === mount?.name);
    const text = configMap(volume?.configMap?.name ?? "")[
      path.slice(1 + (mount?.mountPath.length ?? 0))
    ];
    if (text === undefined) throw new Error(`${path} is not in the pod`);
    return text;
  };
  return { args, env, readFile };
}

/**
 * The ports on which a program listens by its own parser, and how long it ends. Throws for a flag
 * or a setting that it does not know.
 */
function listening(
  objects: readonly KubernetesObject[],
  placed: Placed,
): { ports: number[]; graceMs: number } {
  const { args, env, readFile } = insidePod(objects, placed);
  if (placed.container.image.startsWith("kv-proxy:")) {
    const { port, host, settings } = parseProxy(args, { readFile, env });
    const { admin, timeouts } = readProxySettings(settings);
    expect([host, admin?.host]).toEqual(["0.0.0.0", "0.0.0.0"]);
    return { ports: [port, admin?.port ?? 0], graceMs: timeouts.graceMs };
  }
  if (placed.container.image.startsWith("kv-epp:")) {
    const { port, host, settings } = parseEpp(args, readFile);
    const { healthPort = 0, metricsServer, timeouts } = readEppSettings(settings);
    expect([host, metricsServer?.host]).toEqual(["0.0.0.0", "0.0.0.0"]);
    return {
      ports: [port, healthPort, metricsServer?.port ?? 0],
      graceMs: timeouts.drainMs + timeouts.graceMs,
    };
  }
  const flags = new Map(
    args.slice(1).map((argument) => {
      const [, flag = argument, value = ""] = /^(--[a-z-]+)=(.*)$/s.exec(argument) ?? [];
      return [flag, value] as const;
    }),
  );
  expect(VLLM_FLAGS).toEqual(expect.arrayContaining([...flags.keys()]));
  const json = (flag: string) => JSON.parse(flags.get(flag) ?? "{}") as Record<string, unknown>;
  expect(TRANSFER_MEMBERS).toEqual(
    expect.arrayContaining(Object.keys(json("--kv-transfer-config"))),
  );
  expect(json("--kv-transfer-config")["kv_connector"]).toBe("NixlConnector");
  const events = json("--kv-events-config");
  expect(EVENTS_MEMBERS).toEqual(expect.arrayContaining(Object.keys(events)));
  const eventPorts = [events["endpoint"], events["replay_endpoint"]]
    .filter((endpoint) => endpoint !== undefined)
    .map((endpoint) => Number(String(endpoint).split(":").at(-1)));
  expect(env["PORT"]).toBe(flags.get("--port"));
  const ports = [flags.get("--port"), env["VLLM_NIXL_SIDE_CHANNEL_PORT"], ...eventPorts].map(
    Number,
  );
  return { ports, graceMs: 0 };
}

const podsOf = (objects: readonly KubernetesObject[]) =>
  objects.flatMap(({ spec }) => (spec?.template === undefined ? [] : [spec.template]));
const containersOf = (objects: readonly KubernetesObject[]): Placed[] =>
  podsOf(objects).flatMap((pod) =>
    [...pod.spec.containers, ...(pod.spec.initContainers ?? [])].map((container) => ({
      container,
      pod,
    })),
  );

describe.skipIf(missing !== undefined).each(SHAPES)(
  `deploy/%s (${missing ?? "built by kustomize"})`,
  (shape: Shape) => {
    const objects = built.get(shape) ?? [];
    const pods = podsOf(objects);
    const containers = containersOf(objects);

    test("each object is there once", () => {
      const names = objects.map(({ kind, metadata }) => `${kind} ${metadata.name}`);
      expect(new Set(names).size).toBe(names.length);
      expect(containers.length).toBeGreaterThan(2);
    });

    test.each(containers.map((placed) => [placed.container.name, placed] as const))(
      "%s: the program knows each flag and setting, and listens where ports and probes say",
      (_name, placed) => {
        const { container, pod } = placed;
        const { ports, graceMs } = listening(objects, placed);
        const open = container.ports.map(({ containerPort }) => containerPort);
        expect(new Set(open)).toEqual(new Set(ports));
        for (const { httpGet, tcpSocket, grpc } of [
          container.readinessProbe,
          container.livenessProbe,
        ]) {
          const port = httpGet?.port ?? tcpSocket?.port ?? grpc?.port;
          const byName = container.ports.find(({ name }) => name === port)?.containerPort;
          expect(ports).toContain(byName ?? port);
          if (httpGet !== undefined) expect(httpGet.path).toBe("/health");
        }
        expect(pod.spec.terminationGracePeriodSeconds * 1000).toBeGreaterThan(graceMs);
      },
    );

    test("nothing runs as root, gains rights or writes to its image", () => {
      for (const { spec } of pods)
        expect(spec.securityContext).toMatchObject({
          runAsNonRoot: true,
          seccompProfile: { type: "RuntimeDefault" },
        });
      for (const { container } of containers)
        expect(container.securityContext).toMatchObject({
          allowPrivilegeEscalation: false,
          readOnlyRootFilesystem: true,
          capabilities: { drop: ["ALL"] },
        });
    });

    test("service accounts may list and watch pods and nothing else, and vLLM gets no token", () => {
      for (const { rules } of objects.filter(({ kind }) => kind === "Role"))
        expect(rules).toEqual([{ apiGroups: [""], resources: ["pods"], verbs: ["list", "watch"] }]);
      expect(objects.map(({ kind }) => kind)).not.toContain("ClusterRole");
      const accounts = pods.flatMap(({ spec }) => spec.serviceAccountName ?? []);
      expect(accounts.length).toBeGreaterThan(0);
      for (const account of accounts) {
        const binding = objects.find(
          ({ kind, subjects }) => kind === "RoleBinding" && subjects?.[0]?.name === account,
        );
        expect(
          objects.some(
            ({ kind, metadata }) => kind === "Role" && metadata.name === binding?.roleRef?.name,
          ),
        ).toBe(true);
      }
      for (const { metadata, spec } of pods)
        if (metadata.labels["app"] === "vllm")
          expect(spec.automountServiceAccountToken).toBe(false);
      for (const { container } of containers)
        if (container.name === "vllm")
          expect(container.volumeMounts.map(({ mountPath }) => mountPath)).not.toContain(
            "/var/run/secrets/kubernetes.io/serviceaccount",
          );
    });

    test("each selector takes a pod, and each Service and pool has its port there", () => {
      for (const { kind, spec } of objects) {
        if (kind === "Service") {
          const pod = pods.find(({ metadata }) =>
            selects({ matchLabels: spec?.selector ?? {} }, metadata.labels),
          );
          const names = pod?.spec.containers.flatMap(({ ports }) => ports.map(({ name }) => name));
          for (const { targetPort } of spec?.ports ?? []) expect(names).toContain(targetPort);
        } else if (kind === "InferencePool") {
          const members = pods.filter(({ metadata }) =>
            selects(spec?.selector ?? {}, metadata.labels),
          );
          expect(members.map(({ metadata }) => metadata.labels["llm-d.ai/role"])).toEqual([
            "decode",
          ]);
          const [sidecar] = members[0]?.spec.initContainers ?? [];
          expect(sidecar?.ports.map(({ containerPort }) => containerPort)).toContain(
            spec?.targetPorts?.[0]?.number,
          );
          const picker = objects.find(
            (each) =>
              each.kind === "Service" && each.metadata.name === spec?.endpointPickerRef?.name,
          );
          expect(picker?.spec?.ports?.map(({ port }) => port)).toEqual([
            spec?.endpointPickerRef?.port.number,
          ]);
        } else if (
          kind === "PodDisruptionBudget" ||
          kind === "Deployment" ||
          kind === "NetworkPolicy"
        ) {
          const selector = spec?.podSelector ?? spec?.selector ?? {};
          expect(pods.some(({ metadata }) => selects(selector, metadata.labels))).toBe(true);
        }
      }
    });

    test("P and D have a role, and one revision", () => {
      const servers = pods.filter(({ metadata }) => metadata.labels["app"] === "vllm");
      expect(servers.map(({ metadata }) => metadata.labels["llm-d.ai/role"]).sort()).toEqual([
        "decode",
        "prefill",
      ]);
      expect(new Set(servers.map(({ metadata }) => metadata.labels["kv-revision"]))).toEqual(
        new Set(["1"]),
      );
    });

    test("a client reaches a front end and never vLLM, its side channel, its KV events or an admin port", () => {
      const ENVOY = { namespace: { "kubernetes.io/metadata.name": "envoy-gateway-system" } };
      const withSidecar = shape !== "proxy" && shape !== "eight-gpus";
      for (const pod of pods) {
        const { app = "", "llm-d.ai/role": role } = pod.metadata.labels;
        const ports = (caller: Parameters<typeof reachablePorts>[2]) =>
          reachablePorts(objects, pod, caller);
        const fromClient = app === "kv-proxy" ? [8000] : [];
        expect(ports({ labels: { app: "client" } })).toEqual(fromClient);
        expect(ports({ namespace: { "kubernetes.io/metadata.name": "clients" } })).toEqual(
          fromClient,
        );
        if (app === "vllm") expect(ports({ labels: { app: "vllm" } })).toBe("all");
        if (app === "vllm")
          expect(ports({ labels: { app: "kv-epp" } })).toEqual([
            ...(shape === "eight-gpus" ? RANK_PORTS : [5557, 5558, 5600]),
            8000,
            8200,
          ]);
        if (withSidecar && role === "decode") expect(ports(ENVOY)).toEqual([8000]);
        if (withSidecar && role === "prefill") expect(ports(ENVOY)).toEqual([]);
        if (app === "kv-epp") expect(ports(ENVOY)).toEqual([9002]);
      }
    });
  },
);

describe.skipIf(missing !== undefined)("deploy/efa", () => {
  test("both roles take LIBFABRIC and keep their roles", () => {
    const configs = containersOf(built.get("efa") ?? [])
      .filter(({ container }) => container.name === "vllm")
      .map(
        ({ container }) =>
          container.env?.find(({ name }) => name === "KV_TRANSFER_CONFIG")?.value ?? "",
      )
      .map((text) => JSON.parse(text) as Record<string, unknown>);
    expect(configs.map((config) => config["kv_role"]).sort()).toEqual([
      "kv_consumer",
      "kv_producer",
    ]);
    for (const config of configs)
      expect(config["kv_connector_extra_config"]).toEqual({ backends: ["LIBFABRIC"] });
  });
});

describe.skipIf(missing !== undefined)("deploy/envoy", () => {
  test("the picker names one address: Envoy AI Gateway's cluster answers 503 to a list", () => {
    const objects = built.get("envoy") ?? [];
    const picker = containersOf(objects).find(({ container }) => container.name === "kv-epp");
    if (picker === undefined) throw new Error("there is no kv-epp");
    const { args, readFile } = insidePod(objects, picker);
    expect(readEppSettings(parseEpp(args, readFile).settings).fallbacks).toBe(0);
  });
});
