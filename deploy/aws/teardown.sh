#!/usr/bin/env bash
# Deletes everything that launch.sh made for a run: machines, security group, key
# pair, role, bucket with all that is in it, and the local folder of the run. It
# goes by the tag perdure-run (and by path for the role), so it also clears up
# after a launch that broke. Calling it again does no harm.
#
#   deploy/aws/teardown.sh [--dry-run] [options]
#
#   --run NAME        name of the run (default)
#   --region REGION   default: where it was launched
#   --yes             do not ask
#   --dry-run         print every command, run none
#
# Needs the AWS CLI (version 2) with credentials.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

YES=no
GIVEN=
while [ $# -gt 0 ]; do
  case $1 in
    --run) RUN=${2:?}; shift 2 ;;
    --region) GIVEN=${2:?}; shift 2 ;;
    --yes) YES=yes; shift ;;
    --dry-run) DRY_RUN=yes; shift ;;
    -h | --help) usage; exit ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
names
REGION=${GIVEN:-$(recall REGION "$REGION")}
REGION=${REGION:-${AWS_REGION:-${AWS_DEFAULT_REGION:-us-east-1}}}
names
need aws

if [ "$YES" = no ] && ! dry; then
  read -r -p "Delete all that is tagged $TAG=$RUN in $REGION, bucket included? Type the name of the run: " answer || answer=
  [ "$answer" = "$RUN" ] || die "nothing was deleted"
fi
account=$(cloud_ask 123456789012 sts get-caller-identity --query Account)
FILTER="Name=tag:$TAG,Values=$RUN"

delete_machines() {
  local ids
  ids=$(cloud_ask "i-server i-load" ec2 describe-instances --query 'Reservations[].Instances[].InstanceId' \
    --filters "$FILTER" Name=instance-state-name,Values=pending,running,stopping,stopped,shutting-down)
  [ -n "$ids" ] || return 0
  # shellcheck disable=SC2086 # a list of ids
  cloud ec2 terminate-instances --instance-ids $ids
  # shellcheck disable=SC2086 # a list of ids
  cloud ec2 wait instance-terminated --instance-ids $ids
}

delete_network() {
  local id ids
  ids=$(cloud_ask sg-RUN ec2 describe-security-groups --filters "$FILTER" --query 'SecurityGroups[].GroupId')
  for id in $ids; do
    cloud ec2 delete-security-group --group-id "$id"
  done
  ids=$(cloud_ask key-RUN ec2 describe-key-pairs --filters "$FILTER" --query 'KeyPairs[].KeyPairId')
  for id in $ids; do
    cloud ec2 delete-key-pair --key-pair-id "$id"
  done
}

# delete_role: roles cannot be listed by tag, so this goes by the path, which
# holds the name of the run.
delete_role() {
  local profile profiles role roles policy policies
  profiles=$(cloud_ask "$NAME" iam list-instance-profiles --path-prefix "$IAM_PATH" --query 'InstanceProfiles[].InstanceProfileName')
  for profile in $profiles; do
    roles=$(cloud_ask "$NAME" iam get-instance-profile --instance-profile-name "$profile" --query 'InstanceProfile.Roles[].RoleName')
    for role in $roles; do
      cloud iam remove-role-from-instance-profile --instance-profile-name "$profile" --role-name "$role"
    done
    cloud iam delete-instance-profile --instance-profile-name "$profile"
  done
  roles=$(cloud_ask "$NAME" iam list-roles --path-prefix "$IAM_PATH" --query 'Roles[].RoleName')
  for role in $roles; do
    policies=$(cloud_ask bucket iam list-role-policies --role-name "$role" --query PolicyNames)
    for policy in $policies; do
      cloud iam delete-role-policy --role-name "$role" --policy-name "$policy"
    done
    cloud iam delete-role --role-name "$role"
  done
}

# delete_bucket: the list by tag may still name a bucket that is gone, and may not
# yet name one whose launch broke; so the recorded one is tried as well, and each
# only when it is there and belongs to this account.
delete_bucket() {
  local arn arns bucket buckets
  buckets=$(recall BUCKET "")
  arns=$(cloud_ask "arn:aws:s3:::$NAME-$account" resourcegroupstaggingapi get-resources --resource-type-filters s3 \
    --tag-filters "Key=$TAG,Values=$RUN" --query 'ResourceTagMappingList[].ResourceARN')
  for arn in $arns; do
    bucket=${arn##*:}
    [ "$bucket" = "$buckets" ] || buckets+=" $bucket"
  done
  for bucket in $buckets; do
    there "$bucket" || continue
    cloud s3 rm "s3://$bucket" --recursive --only-show-errors
    cloud s3api delete-bucket --bucket "$bucket" --expected-bucket-owner "$account"
  done
}

# there BUCKET: false when there is none; any other doubt ends the script, since
# it would leave behind what costs money.
there() {
  local words
  words=$({ cloud s3api head-bucket --bucket "$1" --expected-bucket-owner "$account"; } 2>&1) && return
  [[ $words == *404* || $words == *"Not Found"* ]] || die "bucket $1: $words"
  return 1
}

delete_machines # first: they hold the group, the role, and write to the bucket
delete_network
delete_role
delete_bucket
run rm -rf "$DIR"
dry || say "run $RUN is gone"
