// Validates objects of operators by the schemas of their CRDs, which @kubernetes-models has as code.
// node validate_custom_resources.mjs NODE_MODULES < JSON list of objects; prints a JSON list of problems.
import { existsSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

const problems = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${object.kind} ${object.metadata.name}`;
  const [group, version] = object.apiVersion.split("/");
  const path = `${process.argv[2]}/@kubernetes-models/${packages[group]}/${group}/${version}/${object.kind}`;
  // ES modules: .mjs, or .js in packages of nothing else.
  const file = [".mjs", ".js"].map((suffix) => path + suffix).find(existsSync);
  const { [object.kind]: Model } = await import(pathToFileURL(file));
  try {
    new Model(object).validate();
  } catch (error) {
    problems.push(`${name}: ${error.message}`);
  }
}
console.log(JSON.stringify(problems));
