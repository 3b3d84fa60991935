import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

/** Paths of PEM files. */
export interface Certificate {
  readonly cert: string;
  readonly key: string;
}

/**
 * Makes a certificate for 127.0.0.1 and its key: signed by `authority`, or by itself and then an
 * authority.
 */
export function makeCertificate(
  folder: string,
  name: string,
  authority?: Certificate,
): Certificate {
  const [cert, key] = [join(folder, `${name}.pem`), join(folder, `${name}.key`)];
  const [request, extensions] = [join(folder, `${name}.csr`), join(folder, `${name}.ext`)];
  const openssl = (...args: string[]) => execFileSync("openssl", args, { stdio: "pipe" });
  const newKey = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes".split(" ");
  const subject = ["-subj", `/CN=${name}`, "-keyout", key];
  const place = "subjectAltName=IP:127.0.0.1";
  if (authority === undefined) {
    openssl("req", "-x509", ...newKey, ...subject, "-addext", place, "-days", "2", "-out", cert);
    return { cert, key };
  }
  openssl("req", ...newKey, ...subject, "-out", request);
  // etcd's gateway calls etcd with the server's certificate, so that one is a client's as well.
  writeFileSync(extensions, `${place}\nextendedKeyUsage=serverAuth,clientAuth\n`);
  const signer = ["-CA", authority.cert, "-CAkey", authority.key, "-CAcreateserial"];
  openssl(
    "x509",
    "-req",
    "-in",
    request,
    ...signer,
    "-extfile",
    extensions,
    "-days",
    "2",
    "-out",
    cert,
  );
  return { cert, key };
}
