#!/usr/bin/env bash
# Makes what a measurement on AWS needs: a bucket, a role that may use only this
# bucket, a security group that lets in only SSH from here, and two machines, a
# server and a load generator. It costs money until teardown.sh; the machines end
# by themselves after --hours, the bucket does not.
#
#   deploy/aws/launch.sh [--dry-run] [options]
#
#   --run NAME            name of the run, and value of the tag perdure-run (default)
#   --region REGION       default AWS_REGION, AWS_DEFAULT_REGION or us-east-1
#   --instance-type TYPE  of both machines, two vCPUs (c7i.large)
#   --arch amd64|arm64    of that type (amd64)
#   --ssh-cidr CIDR       who may reach port 22; default this machine's public address
#   --hours N             lifetime of the machines, 1 to 48 (8)
#   --dry-run             print every command, run none
#
# Needs the AWS CLI (version 2) with credentials, ssh, curl.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

TYPE=c7i.large
ARCH=amd64
CIDR=
HOURS=8
while [ $# -gt 0 ]; do
  case $1 in
    --run) RUN=${2:?}; shift 2 ;;
    --region) REGION=${2:?}; shift 2 ;;
    --instance-type) TYPE=${2:?}; shift 2 ;;
    --arch) ARCH=${2:?}; shift 2 ;;
    --ssh-cidr) CIDR=${2:?}; shift 2 ;;
    --hours) HOURS=${2:?}; shift 2 ;;
    --dry-run) DRY_RUN=yes; shift ;;
    -h | --help) usage; exit ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
names
[[ $TYPE =~ ^[a-z0-9.-]+$ ]] || die "--instance-type $TYPE: not a type"
[[ $HOURS =~ ^([1-9]|[1-3][0-9]|4[0-8])$ ]] || die "--hours $HOURS: want 1 to 48"
case $ARCH in
  amd64) IMAGE=x86_64 ;;
  arm64) IMAGE=arm64 ;;
  *) die "--arch $ARCH: want amd64 or arm64" ;;
esac
need aws ssh ssh-keygen curl
[ ! -e "$STATE" ] || die "run $RUN exists already ($STATE): choose another --run, or end it with teardown.sh --run $RUN"

if [ -z "$CIDR" ]; then
  CIDR=$(ask 192.0.2.1 curl -fsS --max-time 10 https://checkip.amazonaws.com)/32
fi
[[ $CIDR =~ ^[0-9]+(\.[0-9]+){3}/(3[0-2]|[12]?[0-9])$ && $CIDR != */0 ]] || die "--ssh-cidr $CIDR: want an IPv4 range like 192.0.2.1/32"

account=$(cloud_ask 123456789012 sts get-caller-identity --query Account)
if ! dry; then
  umask 077
  mkdir -p "$DIR"
  trap '[ $? = 0 ] || say "launch.sh did not finish; remove what it made with: $AWS_DIR/teardown.sh --run $RUN --region $REGION"' EXIT
fi
record RUN "$RUN"
record REGION "$REGION"
record ARCH "$ARCH"

# tagged TYPE...: what tags the resources of these types as they are made.
tagged() {
  local type
  for type in "$@"; do
    printf 'ResourceType=%s,Tags=[{Key=%s,Value=%s},{Key=Name,Value=%s}]\n' "$type" "$TAG" "$RUN" "$NAME"
  done
}

make_bucket() {
  local where=()
  # This one region must not be named.
  [ "$REGION" = us-east-1 ] || where=(--create-bucket-configuration "LocationConstraint=$REGION")
  BUCKET=$NAME-$account
  cloud s3api create-bucket --bucket "$BUCKET" "${where[@]}"
  record BUCKET "$BUCKET"
  cloud s3api put-bucket-tagging --bucket "$BUCKET" --tagging "TagSet=[{Key=$TAG,Value=$RUN}]"
  cloud s3api put-public-access-block --bucket "$BUCKET" --public-access-block-configuration \
    BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
}

# make_role: the server's machine may read, write, delete and list in this bucket,
# nothing else. Without the right to list, a missing object answers 403.
make_role() {
  cloud iam create-role --role-name "$NAME" --path "$IAM_PATH" --tags "Key=$TAG,Value=$RUN" --assume-role-policy-document \
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"Service":"ec2.amazonaws.com"},"Action":"sts:AssumeRole"}]}'
  cloud iam put-role-policy --role-name "$NAME" --policy-name bucket --policy-document \
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:DeleteObject"],"Resource":"arn:aws:s3:::'"$BUCKET"'/*"},{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::'"$BUCKET"'"}]}'
  cloud iam create-instance-profile --instance-profile-name "$NAME" --path "$IAM_PATH" --tags "Key=$TAG,Value=$RUN"
  cloud iam add-role-to-instance-profile --instance-profile-name "$NAME" --role-name "$NAME"
  cloud iam wait instance-profile-exists --instance-profile-name "$NAME"
}

# make_network: SSH from here only, and the API only between the two machines.
make_network() {
  local vpc zone
  vpc=$(cloud_ask vpc-DEFAULT ec2 describe-vpcs --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId')
  [ -n "$vpc" ] || die "region $REGION has no default VPC: make one (aws ec2 create-default-vpc), or choose another region"
  # Both machines in one zone, one that has the type.
  zone=$(cloud_ask "${REGION}a" ec2 describe-instance-type-offerings --location-type availability-zone \
    --filters "Name=instance-type,Values=$TYPE" --query 'InstanceTypeOfferings[0].Location')
  [ -n "$zone" ] || die "region $REGION has no instances of type $TYPE"
  SUBNET=$(cloud_ask subnet-DEFAULT ec2 describe-subnets --query 'Subnets[0].SubnetId' --filters \
    "Name=vpc-id,Values=$vpc" "Name=availability-zone,Values=$zone" Name=default-for-az,Values=true)
  [ -n "$SUBNET" ] || die "zone $zone has no default subnet: make one with aws ec2 create-default-subnet --availability-zone $zone"
  GROUP=$(cloud_ask sg-RUN ec2 create-security-group --group-name "$NAME" --description "Perdure measurement $RUN" --vpc-id "$vpc" \
    --tag-specifications "$(tagged security-group)" --query GroupId)
  cloud ec2 authorize-security-group-ingress --group-id "$GROUP" --protocol tcp --port 22 --cidr "$CIDR"
  cloud ec2 authorize-security-group-ingress --group-id "$GROUP" --protocol tcp --port 8080 --source-group "$GROUP"
}

make_keys() {
  run ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$DIR/ssh_key"
  cloud ec2 import-key-pair --key-name "$NAME" --public-key-material "fileb://$DIR/ssh_key.pub" --tag-specifications "$(tagged key-pair)"
  # The API key of the run stays in this folder; it travels by ssh alone.
  dry || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$DIR/api.key"
}

# start_machine server|load [OPTIONS...]: prints its id. A fresh role takes some
# seconds to be known to EC2, so that refusal is no failure at first.
start_machine() {
  local role=$1 refusal=$DIR/refusal specs try id
  shift
  ! dry || refusal=/dev/null
  mapfile -t specs < <(tagged instance volume)
  for try in 1 2 3 4 5 6 7 8 9 10; do
    if id=$(cloud_ask "i-$role" ec2 run-instances --count 1 --instance-type "$TYPE" --subnet-id "$SUBNET" --security-group-ids "$GROUP" \
      --image-id "resolve:ssm:/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-$IMAGE" \
      --key-name "$NAME" --associate-public-ip-address --user-data "file://$DIR/cloud-init.yaml" \
      --metadata-options HttpTokens=required,HttpEndpoint=enabled,HttpPutResponseHopLimit=1 \
      --instance-initiated-shutdown-behavior terminate --client-token "$NAME-$role-$STAMP" \
      --block-device-mappings 'DeviceName=/dev/xvda,Ebs={VolumeSize=20,VolumeType=gp3,Encrypted=true,DeleteOnTermination=true}' \
      --tag-specifications "${specs[@]}" --query 'Instances[0].InstanceId' "$@" 2>"$refusal"); then
      printf '%s\n' "$id"
      return
    fi
    grep -qi 'instance profile' "$refusal" || break
    say "the role is not known to EC2 yet (try $try)"
    sleep 5
  done
  cat "$refusal" >&2
  return 1
}

make_machines() {
  local server load
  STAMP=$(ask STAMP date -u +%s)
  if dry; then
    show sh -c "sed s/@MINUTES@/$((HOURS * 60))/ $AWS_DIR/cloud-init.yaml >$DIR/cloud-init.yaml"
  else
    sed "s/@MINUTES@/$((HOURS * 60))/" "$AWS_DIR/cloud-init.yaml" >"$DIR/cloud-init.yaml"
  fi
  # Only the server may use the bucket.
  server=$(start_machine server --iam-instance-profile "Name=$NAME")
  record SERVER_ID "$server"
  load=$(start_machine load)
  record LOAD_ID "$load"
  cloud ec2 wait instance-running --instance-ids "$server" "$load"
  address SERVER "$server" PublicIpAddress 192.0.2.10
  address SERVER_PRIVATE "$server" PrivateIpAddress 10.0.0.10
  address LOAD "$load" PublicIpAddress 192.0.2.11
}

address() { # address NAME ID FIELD ANSWER: records an address of a machine
  local value
  value=$(cloud_ask "$4" ec2 describe-instances --instance-ids "$2" --query "Reservations[0].Instances[0].$3")
  [ -n "$value" ] || die "machine $2 has no $3"
  record "$1" "$value"
}

# reachable HOST: waits until cloud-init is done there.
reachable() {
  local try
  for try in {1..30}; do
    if remote "$1" true 2>/dev/null; then
      # Status 2: done, with warnings.
      remote "$1" 'cloud-init status --wait >/dev/null || [ $? = 2 ]'
      return
    fi
    say "waiting for ssh on $1 (try $try)"
    sleep 5
  done
  die "$1 cannot be reached by ssh: is $CIDR still the address of this machine?"
}

make_bucket
make_role
make_network
make_keys
make_machines
reachable "$(recall SERVER 192.0.2.10)"
reachable "$(recall LOAD 192.0.2.11)"
dry || say "run $RUN is up; next: deploy/aws/reproduce.sh --run $RUN, then deploy/aws/teardown.sh --run $RUN --region $REGION"
