import { createPrivateKey, X509Certificate } from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";

/** A certificate and its key, as PEM. */
export interface CertificatePair {
  /** With its chain. */
  readonly certificate: Buffer;
  /** PKCS #8, or another form that Node reads. */
  readonly privateKey: Buffer;
}

const TEN_YEARS_MS = 10 * 365 * 86_400_000;

/**
 * Makes a self-signed certificate (ECDSA P-256) for `localhost`. It encrypts, but clients cannot
 * verify it.
 */
export async function selfSigned(commonName: string, nowMs: number): Promise<CertificatePair> {
  // Takes 200 ms and 14 MiB to load.
  const { generate } = await import("selfsigned");
  const made = await generate([{ name: "commonName", value: commonName }], {
    keyType: "ec",
    algorithm: "sha256",
    notBeforeDate: new Date(nowMs - 3_600_000),
    notAfterDate: new Date(nowMs + TEN_YEARS_MS),
    extensions: [
      {
        name: "subjectAltName",
        altNames: [
          { type: 2, value: "localhost" },
          { type: 7, ip: "127.0.0.1" },
        ],
      },
    ],
  });
  return {
    certificate: Buffer.from(`${made.cert}\n`),
    privateKey: Buffer.from(`${made.private}\n`),
  };
}

function readCertificate({ certFile, keyFile }: CertificateFiles): CertificatePair {
  try {
    const pair = { certificate: readFileSync(certFile), privateKey: readFileSync(keyFile) };
    if (new X509Certificate(pair.certificate).checkPrivateKey(createPrivateKey(pair.privateKey)))
      return pair;
  } catch (cause) {
    const message = `the certificate ${certFile} with the key ${keyFile} cannot be read: ${(cause as Error).message}`;
    throw new KvError("KV_CONFIG_INVALID", message, { hint: "give PEM files", cause });
  }
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${keyFile} is not the key of the certificate ${certFile}`,
    {
      hint: "give the key that belongs to the certificate",
    },
  );
}

/** Paths of PEM files. */
export interface CertificateFiles {
  /** With its chain. */
  readonly certFile: string;
  readonly keyFile: string;
}

const LOOK_MS = 5_000;

type Listener = (pair: CertificatePair) => void;

/** A listener's certificate: self-signed, or from files that are read again when they change. */
export class Certificate {
  readonly #commonName: string;
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #listeners = new Set<Listener>();
  #pair: CertificatePair | undefined;
  #seen = "";
  #timer: Timer | undefined;

  /**
   * `true` makes a self-signed one for `commonName`. Changed files that are not valid are logged
   * and not used.
   * @throws `KV_CONFIG_INVALID` if a file cannot be read or the two do not belong together.
   */
  constructor(
    files: CertificateFiles | true,
    {
      commonName,
      clock,
      log,
    }: { readonly commonName: string; readonly clock: Clock; readonly log: Log },
  ) {
    this.#commonName = commonName;
    this.#clock = clock;
    this.#log = log;
    if (files === true) return;
    this.#seen = stateOf(files);
    this.#pair = readCertificate(files);
    this.#timer = clock.setTimer(() => this.#look(files), LOOK_MS);
  }

  /** Await this before the server listens. */
  async ready(): Promise<void> {
    if (this.#pair === undefined) this.#use(await selfSigned(this.#commonName, this.#clock.now()));
  }

  /**
   * Calls `listener` with the present pair, soon, and with each later one. Returns a function that
   * stops it.
   */
  onChange(listener: Listener): () => void {
    this.#listeners.add(listener);
    const pair = this.#pair;
    if (pair !== undefined) queueMicrotask(() => listener(pair));
    return () => this.#listeners.delete(listener);
  }

  close(): void {
    this.#timer?.cancel();
  }

  #look(files: CertificateFiles): void {
    this.#timer = this.#clock.setTimer(() => this.#look(files), LOOK_MS);
    const state = stateOf(files);
    if (state === this.#seen) return;
    this.#seen = state;
    try {
      this.#use(readCertificate(files));
    } catch (error) {
      this.#log.warn("certificate-not-read", { error });
      return;
    }
    this.#log.info("certificate-read", { file: files.certFile });
  }

  #use(pair: CertificatePair): void {
    this.#pair = pair;
    for (const listener of this.#listeners) listener(pair);
  }
}

/** Kubernetes replaces files by renaming a link. */
function stateOf({ certFile, keyFile }: CertificateFiles): string {
  return [certFile, keyFile]
    .map((file) => {
      const stat = statSync(file, { throwIfNoEntry: false });
      return `${stat?.ino} ${stat?.mtimeMs} ${stat?.size}`;
    })
    .join(" ");
}
